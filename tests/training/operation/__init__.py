"""What an operator does with a running job, and what the operator sees of it."""
