"""Keep a session with a server: that of a group with the lighthouse, and of a rank with its group server."""
