"""Messages, their encoding, and names."""
