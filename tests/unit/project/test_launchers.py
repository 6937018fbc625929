"""The shell loop of docs/launchers.md restarts a group unless it would end the same."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "launchers.md"
PYTHON = """#!/bin/sh
echo "$KEEPSTEP_LIGHTHOUSE $REPLICA_GROUP_ID $*" >> starts
exit "$(sed -n "$(wc -l < starts)p" codes)"
"""


@pytest.mark.parametrize(
    ("codes", "starts"), [((0,), 1), ((75, 1, 0), 3), ((70, 78), 2), ((65,), 1), ((76,), 1), ((79,), 1)]
)
def test_the_shell_loop_starts_a_group_again_unless_it_would_end_the_same(tmp_path: Path, codes, starts) -> None:
    (script,) = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    for name, text in (("python", PYTHON), ("sleep", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    subprocess.run(["/bin/sh", "-c", script], cwd=tmp_path, env={"PATH": path}, timeout=30, check=True)
    started = (tmp_path / "starts").read_text().splitlines()
    assert started == ["http://127.0.0.1:29510 0 examples/train_ddp.py --steps 300"] * starts
