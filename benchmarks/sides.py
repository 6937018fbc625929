"""The two sides of every comparison: the Python to run, and the start of its lighthouse in a process of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
WORK = ROOT / ".bench"
"""Git-ignored: torchft's environment, results, logs."""
TORCHFT = "torchft-nightly==2026.10.26"
TORCH_CHECKPOINTING = "torch_checkpointing==0.1.1"
MEGATRON = "megatron-core==0.16.1"
MEGATRON_VARIABLE = "KEEPSTEP_MEGATRON_PYTHON"
"""As for the tests: the Python of an environment that has it, or several, separated by colons. The first is used."""
TORCH = "torch==2.13.0"
PACKAGES = {"keepstep": "keepstep", "torchft": "torchft-nightly", "megatron": "megatron-core"}
START_TIMEOUT = 30.0
HEARTBEAT_TIMEOUT_S = 5
"""The default of both."""


@dataclass(frozen=True)
class Side:
    name: str
    """``keepstep``, ``torchft`` or ``megatron``; also the module that its scripts import."""
    python: Path

    def environment(self) -> dict[str, str]:
        """The environment of every process of this side."""
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}

    def version(self) -> str:
        package = PACKAGES[self.name]
        ask = f"from importlib.metadata import version; print(version({package!r}), 'on torch', version('torch'))"
        return subprocess.check_output([self.python, "-c", ask], text=True).strip()


def keepstep_side() -> Side:
    return Side("keepstep", Path(sys.executable))


def torchft_side(python: Path | None) -> Side:
    """Return torchft's side. Without a ``python`` that has torchft, create ``.bench/torchft`` (minutes, once)."""
    return Side("torchft", python or _environment("torchft", [TORCH], [TORCHFT], [TORCH_CHECKPOINTING]))


def megatron_side() -> Side:
    """Return Megatron Core's side. Without ``KEEPSTEP_MEGATRON_PYTHON``, create ``.bench/megatron`` (minutes, once)."""
    given = os.environ.get(MEGATRON_VARIABLE, "").partition(os.pathsep)[0]
    if given:
        return Side("megatron", Path(given))
    return Side("megatron", _environment("megatron", [TORCH, "psutil", "numpy", "packaging"], ["--no-deps", MEGATRON]))


def _environment(name: str, *installs: list[str]) -> Path:
    """Return the Python of an environment of its own, which the first call creates."""
    home = WORK / name
    ready = home / ".set-up"
    python = home / "bin" / "python"
    if not ready.exists():
        print(f"setting up {home} (a few minutes, once) ...", flush=True)
        subprocess.check_call([sys.executable, "-m", "venv", "--clear", home])
        for packages in installs:
            subprocess.check_call(
                [python, *["-m", "pip", "install", "--quiet", "--disable-pip-version-check"], *packages]
            )
        ready.touch()
    return python


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Lighthouse:
    address: str
    pid: int

    def cpu_seconds(self) -> float:
        """Return the processor time of all its live threads so far, to the nanosecond."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@contextlib.contextmanager
def lighthouse(
    side: Side,
    min_replicas: int,
    log: Path,
    heartbeat_timeout_s: int = HEARTBEAT_TIMEOUT_S,
    event_log: Path | None = None,
    address: str = "127.0.0.1",
    prefix: tuple[str, ...] = (),
) -> Iterator[Lighthouse]:
    """Run the service as its own command starts it, with its default limits.

    keepstep's stores its quorums in a file, as ``keepstep up`` does; torchft's stores nothing. ``event_log`` is for
    keepstep's only.
    """
    port = free_port()
    folder = tempfile.mkdtemp()
    if side.name == "torchft":
        command = [side.python.parent / "torchft_lighthouse", "--bind", f"{address}:{port}"]
        command += ["--min_replicas", str(min_replicas)]
        command += ["--heartbeat_timeout_ms", str(heartbeat_timeout_s * 1000)]
        log = Path(os.devnull)  # it has no quiet mode and logs each quorum in full
    else:
        command = [side.python, "-m", "keepstep_cli", "lighthouse", "--bind", f"{address}:{port}", "--insecure"]
        command += ["--store", f"sqlite:///{folder}/store.sqlite", "--min-replicas", str(min_replicas)]
        command += ["--heartbeat-timeout", str(heartbeat_timeout_s)]
        command += ["--event-log", event_log] if event_log else []
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*prefix, *command], env=side.environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        _await_port(process, address, port, log)
        yield Lighthouse(f"http://{address}:{port}", process.pid)
    finally:
        stop(process)
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Relay:
    address: str
    pid: int

    def forget_peak(self) -> int:
        """Return the resident bytes, and reset ``peak``."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return self._memory("VmRSS")

    def peak(self) -> int:
        """Return the peak of resident bytes."""
        return self._memory("VmHWM")

    def _memory(self, field: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@contextlib.contextmanager
def relay(
    side: Side, log: Path, *flags: str, address: str = "127.0.0.1", command: tuple[str, ...] = ()
) -> Iterator[Relay]:
    """Run keepstep's relay as its own command starts it, without a disk. ``command`` is a prefix for its own."""
    own = [side.python, "-m", "keepstep_cli", "relay", "--bind", f"{address}:0", "--insecure", *flags]
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [*command, *own],
            env=side.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        if not said:
            raise RuntimeError(f"the relay did not start; see {log}")
        yield Relay(said[1], process.pid)
    finally:
        stop(process)


def _await_port(process: subprocess.Popen[bytes], address: str, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the lighthouse ended with {process.returncode}; see {log}")
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
            return
        time.sleep(0.05)  # neither lighthouse prints when it listens
    raise TimeoutError(f"the lighthouse does not listen on port {port} after {START_TIMEOUT} s; see {log}")


def stop(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Send SIGTERM, then SIGKILL after 3 s."""
    process.terminate()
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
