"""What the failures of steps say: which group is to blame, and whether an error is the script's own. Pure."""
