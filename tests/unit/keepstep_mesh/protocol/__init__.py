"""keepstep_mesh.protocol."""
