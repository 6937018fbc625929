"""Conclusions from the history of a job: alerts, blame, goodput, incidents, marks, pace, stragglers. Pure."""
