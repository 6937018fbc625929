"""The metrics service: what workers and lighthouses tell becomes a picture of each job, and of what failures cost."""
