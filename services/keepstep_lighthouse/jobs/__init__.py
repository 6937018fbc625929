"""Run the shell around each job's state machine."""
