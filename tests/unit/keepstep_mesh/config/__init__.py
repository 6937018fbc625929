"""keepstep_mesh.config."""
