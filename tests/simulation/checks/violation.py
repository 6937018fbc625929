"""The exception that a broken rule raises."""

from __future__ import annotations


class Violation(Exception):
    """A rule that must hold in every simulation is broken."""
