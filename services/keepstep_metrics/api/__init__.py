"""Answer HTTP requests."""
