"""Send records to the metrics service, measure throughput."""
