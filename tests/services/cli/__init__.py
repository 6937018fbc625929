"""The `keepstep` command, as a process."""
