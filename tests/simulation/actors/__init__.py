"""The processes that a simulation runs: lighthouses and replica groups, and what they do together."""
