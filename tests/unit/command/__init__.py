"""keepstep_cli."""
