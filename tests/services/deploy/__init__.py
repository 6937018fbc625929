"""The scripts of the images."""
