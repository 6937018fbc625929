"""The checkpoint relay: receives states in hashed chunks, commits them, serves them, and keeps them on disk."""
