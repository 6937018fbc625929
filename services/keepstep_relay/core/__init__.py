"""Decide what a relay keeps, drops and answers. Pure."""
