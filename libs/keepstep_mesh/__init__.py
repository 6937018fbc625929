"""What workers and services share: the protocol, settings, security, connections, and telemetry. Imports no torch."""
