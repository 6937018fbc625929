"""Know which relays and metrics services there are."""
