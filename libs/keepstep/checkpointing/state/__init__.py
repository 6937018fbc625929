"""Conversion of a state dict into bytes and back: description, staging, restoring."""
