"""Commands that start groups and services and stay with them."""
