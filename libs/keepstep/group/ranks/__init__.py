"""Connect rank 0 with the other ranks of its group: both ends, and their messages."""
