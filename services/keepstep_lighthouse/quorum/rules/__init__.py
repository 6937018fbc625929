"""Read the state of a job and say what follows. Pure."""
