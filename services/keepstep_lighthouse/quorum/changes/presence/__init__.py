"""Change which groups are in the job: arrivals, departures, silence, and the end of training. Pure."""
