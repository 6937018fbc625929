"""Keep the worker's session with the lighthouse."""
