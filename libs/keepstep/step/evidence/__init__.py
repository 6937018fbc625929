"""Evidence of failed steps: which group is to blame, and whether an error is the script's own. Pure."""
