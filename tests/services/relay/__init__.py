"""The checkpoint relay."""
