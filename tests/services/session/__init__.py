"""The worker's session client against a scripted lighthouse."""
