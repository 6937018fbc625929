"""Change the state of a job: departures, heals, agreements, orders. Pure."""
