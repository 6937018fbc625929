"""Measure a rebuild of the process group, by members: over keepstep's rendezvous and over torch's TCPStore.

Every member is a process. All leave their Gloo group and build the next one at the same time, as after a change of the
quorum. A rebuild ends when the last member is connected to all others. The two stores take turns. Member 0 hosts both,
so neither has a host of its own. Clients of the TCPStore stay connected; keepstep's connect for each rebuild.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

from figures import Figure, p50
from sides import HERE, Side, keepstep_side, stop

SIZES = (2, 4, 8, 16)
REBUILDS = 20
WARM_UP = 3


class Members:
    def __init__(self, side: Side, size: int, log: Path, stack: contextlib.ExitStack) -> None:
        self._log = log
        self._processes = []
        for rank in range(size):
            with log.open("ab") as errors:
                process = subprocess.Popen(
                    [side.python, HERE / "rebuild_ends.py", str(rank), str(size)],
                    env=side.environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            stack.callback(stop, process)
            self._processes.append(process)
        heard = [self._read(process, "ready") for process in self._processes]
        self.addresses = {"ours": heard[0][1], "tcp": heard[0][2]}

    def rebuild(self, kind: str, number: int) -> float:
        """Return the milliseconds until the last member is done."""
        began = time.perf_counter()
        for process in self._processes:
            self._tell(process, f"{kind} {number} {self.addresses[kind]}")
        for process in self._processes:
            self._read(process, "built")
        return (time.perf_counter() - began) * 1e3

    def counts(self) -> dict[str, int]:
        """Return counters of keepstep's table since the last call: bytes held, HTTP requests, bytes answered."""
        self._tell(self._processes[0], "counts")
        return dict(zip(("held", "requests", "sent"), map(int, self._read(self._processes[0], "")), strict=True))

    def _tell(self, process: subprocess.Popen[str], line: str) -> None:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()

    def _read(self, process: subprocess.Popen[str], word: str) -> list[str]:
        said = process.stdout.readline().split()
        if not said or (word and said[0] != word):
            raise RuntimeError(f"a member said {said} instead of {word!r}; see {self._log}")
        return said


def run(*, quick: bool, log: Path, sizes: tuple[int, ...] = SIZES) -> list[Figure]:
    figures = []
    for size in sizes:
        print(f"rebuild, {size} members ...", flush=True)
        times: dict[str, list[float]] = {"ours": [], "tcp": []}
        counts = []
        with contextlib.ExitStack() as stack:
            members = Members(keepstep_side(), size, log, stack)
            for number in range(1, WARM_UP + (REBUILDS // 4 if quick else REBUILDS) + 1):
                for kind, found in times.items():
                    took = members.rebuild(kind, number)
                    if number > WARM_UP:
                        found.append(took)
                counts.append(members.counts())
        also = {f"rendezvous_{key}": p50([one[key] for one in counts[WARM_UP:]]) for key in counts[0]}
        definition = (
            "from the order to leave the Gloo group until the last member is connected in the next; theirs: TCPStore"
        )
        figures.append(
            Figure(
                f"rebuild, {size} members", "ms", "p50", times["ours"], times["tcp"], definition=definition, also=also
            )
        )
    return figures
