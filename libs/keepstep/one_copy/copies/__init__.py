"""Copies of the state of a rank in the memory of its keeper: how they are sent, kept, and replayed."""
