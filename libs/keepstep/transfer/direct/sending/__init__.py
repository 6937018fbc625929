"""Send live state to the groups that heal: the checkpoint server, and the queue of its readers."""
