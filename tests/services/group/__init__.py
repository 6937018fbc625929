"""The ranks of a group, over real sockets."""
