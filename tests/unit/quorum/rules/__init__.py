"""Decisions that only read the state of a job: quorum, members, lineages, reasons."""
