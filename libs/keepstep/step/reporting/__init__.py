"""Report steps and heals: to a log file, to the metrics service, and to the lighthouse."""
