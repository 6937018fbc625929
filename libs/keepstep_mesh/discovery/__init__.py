"""Register a service with the lighthouse, so that workers find it."""
