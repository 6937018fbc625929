"""Rules that all groups train the same: equal settings, parameters, collectives, and values. Pure."""
