"""Warnings about mistakes of a training script that train different models without an error."""
