"""The repository itself: documents, deployment, rules of the code."""
