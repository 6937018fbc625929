"""Change the state of a job: health, departures, membership, heals, agreements, orders. Pure."""
