"""Reports of a rank of a job with one copy: of its shard to the lighthouse, of its steps to a log and to services."""
