"""Replica groups and their lighthouses in virtual time, under faults drawn from a seed."""
