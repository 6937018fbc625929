"""Fork the ranks of a restart from a process that has done their imports."""
