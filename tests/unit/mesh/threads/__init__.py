"""Threads whose start cannot hang, the watchdog, the end of a process."""
