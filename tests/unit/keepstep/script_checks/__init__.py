"""keepstep.script_checks."""
