"""Take a step again, with the same gradients, after a member of its quorum was lost (``retry_allreduce``)."""
