"""Gather the checks and the packages that a GPU machine without a package registry needs, in one folder.

make gpu-bundle                      the folder .gpu-bundle, for Python 3.12
make gpu-bundle GPU_PYTHON=3.13      the same for another Python

The folder holds the wheel of keepstep, wheels of what keepstep needs beside PyTorch, the checks, and ``run.sh``. Copy
it to the machine and run ``bash run.sh``: it makes an environment that sees the machine's own packages, installs only
those that are missing there, and runs the checks. Exit code: 0 if the folder is complete, 1 if a package was not
found or the folder is too large.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from tests.gpu.starting import ROOT

LIMIT_BYTES = 60 << 20
"""Size of the folder that is still quick to copy to a machine over a slow connection."""
EXTRAS = ("train", "services")
OF_THE_MACHINE = frozenset({"torch", "numpy"})
"""Distributions that a machine for training has; their versions belong to its driver."""
RUN = """\
#!/usr/bin/env bash
# Make an environment beside this file, install the missing packages without a network, and run the checks.
# Arguments go to the checks: bash run.sh --only collectives; bash run.sh --list. PYTHON names the machine's Python.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
if [ ! -x "$here/env/bin/python" ]; then
  "$python" -m venv --without-pip "$here/env"
  "$python" -c 'import sysconfig; print(*{sysconfig.get_path(f"{kind}lib") for kind in ("pure", "plat")}, sep="\\n")' \\
    >"$(echo "$here"/env/lib/python3*/site-packages)/machine.pth"
  "$python" -m pip --disable-pip-version-check --python "$here/env/bin/python" install --quiet --no-index \\
    --no-compile --find-links "$here/wheels" 'keepstep[train,services]'
fi
cd "$here/checks"
OPENBLAS_NUM_THREADS=1 exec "$here/env/bin/python" -m tests.gpu "$@"
"""


def main() -> int:
    options = _parser().parse_args()
    folder: Path = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)], cwd=ROOT, check=True)
    missing = [one for one in sorted(needed("keepstep", EXTRAS)) if not _fetched(one, wheels, options.python)]
    checks = folder / "checks"
    shutil.copytree(ROOT / "tests" / "gpu", checks / "tests" / "gpu", ignore=shutil.ignore_patterns("__pycache__"))
    (checks / "tests" / "__init__.py").touch()
    (checks / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "gpus.md", checks / "docs")
    (folder / "run.sh").write_text(RUN)
    size = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
    print(f"{folder}: {len(list(wheels.iterdir()))} wheels, {size / 2**20:.1f} MiB; copy it and run: bash run.sh")
    if missing:
        print(f"no wheel for Python {options.python} of: {', '.join(missing)}", file=sys.stderr)
    if size > LIMIT_BYTES:
        print(f"the folder has {size / 2**20:.1f} MiB (limit {LIMIT_BYTES >> 20} MiB)", file=sys.stderr)
    return 1 if missing or size > LIMIT_BYTES else 0


def needed(name: str, extras: Iterable[str]) -> set[str]:
    """Return ``name==version`` of all that a distribution of this environment needs, without what the machine has.

    Args:
        name: an installed distribution. Those that it needs are followed; one that is not installed here is not
            needed on this platform.
        extras: its extras whose requirements count too.
    """
    found: dict[str, str] = {}
    todo = [(name, frozenset(extras))]
    while todo:
        current, wanted = todo.pop()
        for line in metadata.requires(current) or []:
            child, _, marker = line.partition(";")
            extra = re.search(r"extra == [\"']([^\"']+)", marker)
            if extra is not None and extra.group(1) not in wanted:
                continue
            child = re.split(r"[\s\[<>=!~(]", child.strip(), maxsplit=1)[0].lower().replace("_", "-")
            if child in found or child in OF_THE_MACHINE:
                continue
            try:
                found[child] = metadata.version(child)
            except metadata.PackageNotFoundError:
                continue
            todo.append((child, frozenset()))
    return {f"{child}=={version}" for child, version in found.items()}


def _fetched(requirement: str, wheels: Path, python: str) -> bool:
    """Store a wheel; build it if the registry has only the source of a package without compiled parts."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    download = ["download", "--no-deps", "--only-binary=:all:", "--python-version", python, "--dest", str(wheels)]
    build = ["wheel", "--no-deps", "--wheel-dir", str(wheels)]
    return any(
        subprocess.run([*pip, *way, requirement], stderr=subprocess.DEVNULL, check=False).returncode == 0
        for way in (download, build)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make gpu-bundle", description="Packages and checks for a machine without a registry."
    )
    parser.add_argument("--python", default="3.12", help="version of the machine's Python (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / ".gpu-bundle", help="folder to write; it is replaced")
    return parser


if __name__ == "__main__":
    sys.exit(main())
