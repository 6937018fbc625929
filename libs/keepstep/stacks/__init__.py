"""Tell what this process does now, while its training thread may hang: stacks, sections, child processes."""
