"""Start, watch and restart processes on this machine."""
