"""Durable checkpoints of a model that exists once: written by all ranks, read by any number."""
