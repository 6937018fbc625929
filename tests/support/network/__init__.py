"""Networks, servers, name servers and certificates that fail as a test orders."""
