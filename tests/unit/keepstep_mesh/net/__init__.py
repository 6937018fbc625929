"""keepstep_mesh.net."""
