"""``python -m keepstep_cli``: the ``keepstep`` command where it is not on the PATH."""

from keepstep_cli.main import main

main(prog_name="keepstep")
