"""Name the rank and the line in which a job hangs, and end its group. Pure."""
