"""Read live status from the lighthouse and the relays, and drain stragglers."""
