"""keepstep.lifecycle."""
