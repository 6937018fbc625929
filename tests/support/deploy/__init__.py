"""Readers of the files in deploy/."""
