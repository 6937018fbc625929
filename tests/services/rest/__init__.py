"""The REST interface of the lighthouse."""
