"""keepstep_mesh.telemetry."""
