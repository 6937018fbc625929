"""Orders of an operator to a running job, and the operator's view of it."""
