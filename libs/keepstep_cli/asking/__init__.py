"""Ask a lighthouse or relay over REST, and show the answer as tables."""
