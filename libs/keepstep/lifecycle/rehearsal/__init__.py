"""Rehearse a step before the first quorum: local collectives, no commit, and the state as it was before."""
