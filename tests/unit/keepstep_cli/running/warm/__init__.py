"""keepstep_cli.running."""
