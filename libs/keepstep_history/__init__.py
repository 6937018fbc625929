"""Check what a run wrote down against what must hold. Pure but for ``records.lines_of``; used by command, demo and tests."""
