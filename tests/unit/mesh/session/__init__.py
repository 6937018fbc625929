"""The worker's session with the lighthouse, as a state machine."""
