"""Save, load, and heal a state that is larger than the memory of this machine can hold twice.

python -m tests.faults.large --gib 20 --folder /var/tmp

The tensors of each process lie in mapped files, so that the kernel can write them out. Each process compares every
value that it has received. A heal goes from one process to another, whose source stages its state: a copy in memory,
so ``--heal-gib`` is smaller. It needs ``--gib`` of disk twice, and ``--heal-gib`` of memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch

TENSOR_BYTES = 256 << 20
LIMIT = timedelta(seconds=1800)
RELAY_MEMORY = "1GiB"


def mapped(folder: Path, gib: float) -> dict[str, torch.Tensor]:
    """Return tensors of int64 in files of ``folder``, of zeros."""
    folder.mkdir()
    count = TENSOR_BYTES // 8
    return {
        f"layer.{number}": torch.from_file(str(folder / f"{number}"), shared=True, size=count, dtype=torch.int64)
        for number in range(round(gib * (1 << 30) / TENSOR_BYTES))
    }


def values(number: int) -> torch.Tensor:
    """Return the values of a tensor, each of which occurs once in the state."""
    count = TENSOR_BYTES // 8
    return torch.arange(number * count, (number + 1) * count)


def filled(folder: Path, gib: float) -> dict[str, torch.Tensor]:
    state = mapped(folder, gib)
    for number, tensor in enumerate(state.values()):
        tensor.copy_(values(number))
    return state


def compare(state: dict[str, torch.Tensor]) -> None:
    for number, (name, tensor) in enumerate(state.items()):
        if not torch.equal(tensor, values(number)):
            raise AssertionError(f"{name} has other values than were sent")


def anonymous_bytes() -> int:
    """Return the memory of this process without its files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


class Peak:
    """The most memory during a ``with`` block, beyond that at its start, and its seconds."""

    def __enter__(self) -> Self:
        self._start, self.most, self.began = anonymous_bytes(), 0, time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self.most = max(self.most, anonymous_bytes() - self._start)

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self.began
        self._over.set()
        self._thread.join()


def save(folder: Path, gib: float, place: str) -> Peak:
    from keepstep import checkpoint

    state = filled(folder, gib)
    with Peak() as peak:
        checkpoint.save({"model": state}, place)
    return peak


def load(folder: Path, gib: float, place: str) -> Peak:
    from keepstep import checkpoint

    state = mapped(folder, gib)
    with Peak() as peak:
        checkpoint.load({"model": state}, place)
    compare(state)
    return peak


def send(folder: Path, gib: float, _: str) -> Peak:
    """Serve a state until standard input ends."""
    from keepstep.checkpointing import RelayTransport

    transport: RelayTransport[Any] = RelayTransport(LIMIT, list, 0, "127.0.0.1")
    state = filled(folder, gib)
    with Peak() as peak:
        transport.send_checkpoint([1], 1, {"model": state}, LIMIT)
    print(json.dumps({"metadata": transport.metadata()}), flush=True)
    sys.stdin.read()
    transport.shutdown()
    return peak


def heal(folder: Path, gib: float, metadata: str) -> Peak:
    from keepstep.checkpointing import RelayTransport

    transport: RelayTransport[Any] = RelayTransport(LIMIT, list, 0, "127.0.0.1")
    state = mapped(folder, gib)
    with Peak() as peak:
        transport.recv_checkpoint(0, metadata, 1, LIMIT, into={"model": state})
    transport.shutdown()
    compare(state)
    return peak


ENDS = {end.__name__: end for end in (save, load, send, heal)}


class End:
    """A process that runs one of ``ENDS``."""

    def __init__(self, name: str, folder: Path, gib: float, place: str) -> None:
        self.name, self.folder, self.gib = name, folder / name, gib
        command = [sys.executable, "-m", "tests.faults.large", "--end", name, "--gib", str(gib)]
        self.process = subprocess.Popen(
            [*command, "--folder", str(self.folder), "--place", place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def said(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait(60)}")
        return json.loads(line)

    def finish(self) -> None:
        """Print its row, and delete its files."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        told = self.said()
        self.process.wait(60)
        subprocess.run(["rm", "-r", str(self.folder)], check=True)
        rate = self.gib * (1 << 30) / told["seconds"] / 1e9
        memory = told["memory"] / (1 << 30)
        print(f"{self.name:5} {self.gib:g} GiB: {told['seconds']:.1f} s, {rate:.2f} GB/s, {memory:.2f} GiB of memory",
              flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=20.0)
    parser.add_argument("--heal-gib", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on a disk with room for two states")
    parser.add_argument("--end", choices=list(ENDS), help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.end is not None:
        peak = ENDS[options.end](options.folder, options.gib, options.place)
        print(json.dumps({"seconds": peak.seconds, "memory": peak.most}), flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="keepstep-large-", dir=options.folder) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "keepstep_cli", "relay", "--bind", "127.0.0.1:0", "--insecure"]
        command += ["--memory", RELAY_MEMORY, "--data-dir", str(folder / "relay")]
        relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert relay.stdout is not None
            place = f"{relay.stdout.readline().split()[1]}/v1/jobs/large/checkpoints/1"
            End("save", folder, options.gib, place).finish()
            End("load", folder, options.gib, place).finish()
        finally:
            relay.terminate()
            relay.wait(60)
        subprocess.run(["rm", "-r", str(folder / "relay")], check=True)
        source = End("send", folder, options.heal_gib, "")
        End("heal", folder, options.heal_gib, source.said()["metadata"]).finish()
        source.finish()


if __name__ == "__main__":
    main()
