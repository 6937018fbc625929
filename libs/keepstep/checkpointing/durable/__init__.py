"""Durable checkpoints of a job: uploaded in the background, found and loaded when all its groups were lost."""
