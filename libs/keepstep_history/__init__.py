"""Check the logs of a run against what must hold. Pure, but for ``reading`` and ``records.lines_of``."""
