"""Change the state of a job: arrivals, requests, health, departures, membership, heals, orders, and more. Pure."""
