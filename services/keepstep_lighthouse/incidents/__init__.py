"""Why groups ended: what a launcher and the lighthouse know of an end in, a verdict and its evidence out. Pure."""
