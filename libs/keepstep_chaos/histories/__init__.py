"""Check the logs of a run against its invariants. Pure, except ``reading``, ``records.files_of`` and ``lines_of``."""
