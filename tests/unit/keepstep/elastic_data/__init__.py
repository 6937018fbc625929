"""keepstep.elastic_data."""
