"""The tokens of a compose project, each in a volume of its own so that nobody sees another's.

``setup.py FOLDER``. ``tokens`` is made unless it is there, and is what counts. Who changes it runs this again, which
hands out the first worker token to the trainers and the first service token to Prometheus, which reads only.
"""

import os
import secrets
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
TOKENS = FOLDER / "tokens" / "tokens"


def write(file: Path, text: str) -> None:
    """All of it or nothing; for its owner only."""
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
    sys.exit(f"{TOKENS} has no token for {' and '.join(sorted(missing))}: write a line `role = token` for each")
write(FOLDER / "worker-token" / "token", first["worker"])
write(FOLDER / "prometheus-token" / "token", first["service"])
