"""keepstep_mesh.security."""
