"""Start threads, and end a process that is stuck."""
