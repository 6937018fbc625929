"""Check a mesh from this machine: probes ask, findings judge."""
