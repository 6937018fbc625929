"""Serve and use the key-value store over which a process group is built."""
