"""The queue of records for the metrics service."""
