"""The end of training: groups finish together, and no quorum begins far below the step reached. Pure."""
