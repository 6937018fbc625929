"""Write what outlives the process."""
