"""The client of relays."""
