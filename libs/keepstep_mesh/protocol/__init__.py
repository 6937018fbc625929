"""Define what travels between services and workers: messages, their codec, names and digests. Pure."""
