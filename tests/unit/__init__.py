"""One module at a time, a folder for each package or room."""
