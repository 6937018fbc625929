"""Key-value stores: the one over which a process group is built, and the one in which ranks of a group meet."""
