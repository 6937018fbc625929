"""Create and distribute the tokens of a compose project: ``setup.py FOLDER``.

Each kind of container has a volume of its own for its token, so that it cannot read another's. The file ``tokens`` is
the source; this script creates it if it is missing. Run the script again after you change the file: it copies the first
worker token for the trainers, and the first service token for Prometheus, which only reads.
"""

import os
import secrets
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
TOKENS = FOLDER / "tokens" / "tokens"


def write(file: Path, text: str) -> None:
    """Replace ``file`` atomically, readable by its owner only."""
    part = file.with_suffix(".part")
    part.touch(mode=0o600)
    part.write_text(text)
    part.replace(file)


os.umask(0o077)
if not TOKENS.exists():
    write(TOKENS, "".join(f"{role} = {secrets.token_urlsafe()}\n" for role in ("worker", "service", "admin")))
lines = [line.strip().partition("=") for line in TOKENS.read_text().splitlines()]
first = {role.partition(" ")[0]: token.strip() for role, _, token in reversed(lines) if token}
if missing := {"worker", "service"} - first.keys():
    sys.exit(f"{TOKENS} has no token for {' and '.join(sorted(missing))}: add a line `role = token` for each")
write(FOLDER / "worker-token" / "token", first["worker"])
write(FOLDER / "prometheus-token" / "token", first["service"])
