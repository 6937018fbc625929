"""The collectives of a step: start them under its quorum, wait for them, and write their results back."""
