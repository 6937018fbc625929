"""Several lighthouses and services that share one store."""
