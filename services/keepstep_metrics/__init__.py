"""The metrics service: what the mesh does and did, as JSON, for Prometheus, and as a page for people."""
