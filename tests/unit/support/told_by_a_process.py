"""Print what this process sees, then end in the way that the first argument names."""

import atexit
import json
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    told = {
        "arguments": sys.argv[1:],
        "folder": str(Path.cwd()),
        "path": sys.path[0],
        "file": __file__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
        "parent": os.getppid(),
        "session": os.getsid(0) == os.getpid(),
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        "signals": {one.name: str(signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)},
        "streams": [
            [one.fileno(), one.encoding, one.errors, one.line_buffering] for one in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "first": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
        "stdin": sys.stdin.read(),
    }
    print(json.dumps(told))
    print("to stderr", file=sys.stderr)
    atexit.register(print, "at exit")
    if sys.argv[1] == "fail":
        raise RuntimeError("fail")
    if sys.argv[1] == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(7)
