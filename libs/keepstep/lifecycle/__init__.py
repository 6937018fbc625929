"""Start one Manager and end it: its settings, its parts, and how its group leaves the job."""
