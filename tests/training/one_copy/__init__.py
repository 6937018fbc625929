"""A model that exists once."""
