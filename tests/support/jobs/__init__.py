"""Real training jobs: trainers, process groups, and the lighthouses they train under."""
