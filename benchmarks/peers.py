"""Processes of a benchmark: peers that carry out commands line by line, and trainers that run to their end."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sides import Side, stop

RUN_TIMEOUT = 300.0
"""Of the wait for each trainer, in seconds."""


class Peer:
    """A process that reads commands and prints answers, one line each. The end of ``stack`` stops it.

    Args:
        side: its environment.
        command: its program and arguments.
        log: gets its standard error.
    """

    def __init__(self, side: Side, command: Sequence[object], log: Path, stack: contextlib.ExitStack) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                env=side.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        stack.callback(stop, self._process)

    def tell(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self, word: str = "") -> list[str]:
        """Return the words of the next line, after ``word``, with which it must begin."""
        words = self._process.stdout.readline().split()
        if not words or (word and words[0] != word):
            raise RuntimeError(f"a peer printed {words} instead of {word or 'an answer'!r}; see {self._log}")
        return words[1:] if word else words


def run_to_end(side: Side, commands: Sequence[Sequence[object]], log: Path, name: str) -> None:
    """Run trainers at the same time. RuntimeError if one of them fails; ``name``: of their library."""
    with contextlib.ExitStack() as stack:
        trainers = []
        for command in commands:
            with log.open("ab") as errors:
                trainer = subprocess.Popen(
                    [str(word) for word in command],
                    env=side.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            stack.callback(stop, trainer)
            trainers.append(trainer)
        for trainer in trainers:
            if trainer.wait(RUN_TIMEOUT) != 0:
                raise RuntimeError(f"a trainer of {name} ended with {trainer.returncode}; see {log}")
