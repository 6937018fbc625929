"""Live state from group to group: directly, or through relays and other groups that heal."""
