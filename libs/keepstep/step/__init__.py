"""Run one training step: plan, collectives, heal, vote, commit."""
