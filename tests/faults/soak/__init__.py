"""A long run of a real job under the faults of ``keepstep chaos``, for ``make soak``."""
