"""Store batches, snapshots and events in SQLite."""
