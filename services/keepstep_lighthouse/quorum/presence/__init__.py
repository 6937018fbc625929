"""Presence of groups: which may come, arrive, leave, are silent or lost, and what follows for the job. Pure."""
