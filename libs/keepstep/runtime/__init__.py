"""Own the event-loop thread and its tasks; read the environment; end the process."""
