"""Key-value stores: one to connect process groups, and one to connect the ranks of a group."""
