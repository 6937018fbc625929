"""Parts that every service has: listening, tokens, TLS, WebSockets."""
