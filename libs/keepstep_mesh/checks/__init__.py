"""Checks of a machine and of the services around it, for ``keepstep doctor`` and before a group joins its job."""
