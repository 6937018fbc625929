"""Commands that change a running job."""
