"""The metrics service: the state and history of each job, and the cost of its failures, with a dashboard."""
