"""Messages as each version of the protocol wrote them, and what records and reads them."""
