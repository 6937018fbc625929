"""keepstep_mesh."""
