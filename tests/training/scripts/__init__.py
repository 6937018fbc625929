"""Training scripts as a user writes and starts them."""
