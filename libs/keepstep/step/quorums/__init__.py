"""The quorums of one step: request them, build their process groups, and heal in them before the forward pass."""
