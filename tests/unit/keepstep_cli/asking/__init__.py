"""keepstep_cli.asking."""
