"""Open connections: HTTP client and errors, addresses, WebSocket frames, the event loop and its tasks."""
