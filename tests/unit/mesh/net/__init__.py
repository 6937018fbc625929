"""Addresses, the event loop, sockets in forked children, web pages."""
