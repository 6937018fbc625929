"""Change the state of a job: who comes, goes, heals, and what was ordered. Pure."""
