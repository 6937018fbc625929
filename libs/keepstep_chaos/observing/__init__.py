"""The job from outside: its processes, their logs, memory, and descriptors."""
