"""A group that joins without a stall: it follows the steps of the others while their state arrives."""
