"""Read settings from flags, the environment and files; configure logs."""
