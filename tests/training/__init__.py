"""Real training processes, killed, frozen, cut off and operated."""
