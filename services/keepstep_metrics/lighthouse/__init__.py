"""Ask the lighthouse what only it knows, and order drains."""
