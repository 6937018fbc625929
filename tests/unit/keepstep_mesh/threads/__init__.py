"""keepstep_mesh.threads."""
