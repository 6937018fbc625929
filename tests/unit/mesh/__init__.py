"""keepstep_mesh, a folder for each room."""
