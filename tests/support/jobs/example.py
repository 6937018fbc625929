"""Run a script of ``examples/`` with its arguments: as a script of the tests it starts without a wait for imports."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
