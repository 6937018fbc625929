"""Heals through relays."""
