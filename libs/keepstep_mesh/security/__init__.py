"""Check tokens, load TLS files, reload both when they change, write the audit log."""
