"""The lighthouse: the quorum of each job, its membership in a store, and a REST API to inspect, drain, and evict."""
