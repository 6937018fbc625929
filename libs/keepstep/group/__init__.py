"""Join the ranks of one replica group: rank 0 serves the others and speaks to the lighthouse."""
