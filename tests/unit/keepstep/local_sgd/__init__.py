"""keepstep.local_sgd."""
