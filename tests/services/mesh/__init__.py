"""What every service has in common: listening, tokens, TLS, WebSockets."""
