"""Group servers and checkpoint transports."""
