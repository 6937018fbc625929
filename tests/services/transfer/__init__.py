"""Live state from group to group, without a relay."""
