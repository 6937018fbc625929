"""Every service over real sockets, a folder for each."""
