"""Decide the quorum of one job: a pure state machine, events in, decisions out."""
