"""The life of a job in the lighthouse: events, orders, stragglers, deletion."""
