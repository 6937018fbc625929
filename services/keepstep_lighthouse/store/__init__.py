"""Keep membership in a compare-and-swap key-value store."""
