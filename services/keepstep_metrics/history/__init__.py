"""Keep the recent history of each job. Pure."""
