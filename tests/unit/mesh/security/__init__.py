"""Tokens, files that are read again when they change, the audit log."""
