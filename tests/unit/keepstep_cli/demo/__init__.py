"""keepstep_cli.demo."""
