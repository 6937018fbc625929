"""A connection to another process over a blocking socket, the deadline of a transfer, and its limit of bandwidth."""
