"""The rules that form a quorum, its members and id, and its announcement. Pure."""
