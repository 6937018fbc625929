"""The Manager in real replica groups."""
