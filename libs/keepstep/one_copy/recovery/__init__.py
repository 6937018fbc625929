"""The way back after a change of members: ranks meet, and read the shards that they need from each other."""
