"""Run a script for torchft or Megatron Core on keepstep.

    python -m keepstep.compat train.py --lr 0.1        instead of  python train.py --lr 0.1
    python -m keepstep.compat -m torch.distributed.run ... train.py
    export PYTHONPATH=$(python -m keepstep.compat)     for all that is started from this shell

It starts Python again in the same process, with a folder at the front of PYTHONPATH that makes ``import torchft`` and
``import megatron.core.dist_checkpointing`` find keepstep. Processes that the script starts inherit it. Without
arguments it prints the folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).with_name("on_path")
"""In front of PYTHONPATH, its ``sitecustomize`` runs at the start of Python, and its ``torchft`` is found first."""


def command(executable: str, original: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs ``arguments`` in this Python, with the options of this one.

    Args:
        executable: of this Python.
        original: its command line (``sys.orig_argv``): executable, options, ``-m keepstep.compat``, arguments.
        arguments: those after ``-m keepstep.compat``.
    """
    options = list(original[1 : len(original) - len(arguments)])
    if options[-1] == "keepstep.compat":
        options.pop()
    last = options.pop().removesuffix("keepstep.compat").removesuffix("m")  # of -m, -um, or -mkeepstep.compat
    return [executable, *options, *([] if last == "-" else [last]), *arguments]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the folder in front of PYTHONPATH."""
    others = [one for one in environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != str(FOLDER)]
    return {**environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *others])}


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if not arguments:
        print(FOLDER)  # noqa: T201
        return
    if arguments[0] in ("-h", "--help"):
        print(__doc__)  # noqa: T201
        return
    if sys.flags.ignore_environment:
        sys.exit("keepstep.compat: Python ignores PYTHONPATH because of its option -E or -I: start it without that one")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command(sys.executable, sys.orig_argv, arguments), environment(os.environ))  # noqa: S606


if __name__ == "__main__":
    main()
