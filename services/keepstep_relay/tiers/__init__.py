"""Hold chunks in memory, on disk and in the durable tier."""
