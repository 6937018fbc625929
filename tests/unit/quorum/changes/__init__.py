"""Changes of the state of a job: sessions, requests, orders, heals, stragglers, settings."""
