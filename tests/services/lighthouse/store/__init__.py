"""The stores below the lighthouse, and the lighthouse when its store fails."""
