"""One module at a time, a folder for each room of the product."""
