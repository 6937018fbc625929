"""Join the ranks of a group into one: both ends of their connections, and their merged requests and votes."""
