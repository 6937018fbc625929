"""The parts that workers and services share: protocol, settings, security, connections, telemetry. Imports no torch."""
