"""Drivers, servers and models that tests share."""
