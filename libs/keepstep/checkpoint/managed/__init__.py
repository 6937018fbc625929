"""Durable checkpoints of a Manager: uploaded in the background, found and loaded when all its groups were lost."""
