"""Elect the leader, and find it."""
