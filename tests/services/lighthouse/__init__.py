"""The lighthouse."""
