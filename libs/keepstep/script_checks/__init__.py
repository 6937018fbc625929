"""Warn about, or refuse, mistakes of a training script that train different models without an error."""
