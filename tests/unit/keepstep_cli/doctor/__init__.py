"""keepstep_cli.doctor."""
