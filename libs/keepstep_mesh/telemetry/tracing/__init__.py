"""Spans and logs of OpenTelemetry, from the facts of records; their export is optional, and off by default."""
