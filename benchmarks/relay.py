"""Measure the relay's raw path: PUT and GET of one state over loopback, with every chunk verified by the relay.

    python benchmarks/relay.py --mebibytes 1024 --streams 2 --data-dir /dev/shm/relay

The client's threads write HTTP themselves, so that they cost as little as a trainer's receiver. Prints GB/s of each and
the longest time for which the relay's event loop did not answer, and writes JSON with ``--json``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import msgpack
import psutil

from keepstep_mesh.protocol.manifest import CHUNK_BYTES, Origin, chunk_digest, pack_envelope

CHECKPOINTS = "/v1/jobs/bench/checkpoints"


class Connection:
    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb", buffering=0)
        self._scratch = memoryview(bytearray(CHUNK_BYTES))

    def ask(self, head: str, body: memoryview | None = None, statuses: tuple[int, ...] = (200, 201)) -> memoryview:
        self._socket.sendall(head.encode())
        if body is not None:
            self._socket.sendall(body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._socket.recv(16 << 10)
        header, _, rest = received.partition(b"\r\n\r\n")
        status = int(header.split(b" ", 2)[1])
        lines = dict(line.lower().split(b": ", 1) for line in header.split(b"\r\n")[1:])
        length = int(lines[b"content-length"])
        view = self._scratch[:length]
        view[: len(rest)] = rest
        done = len(rest)
        while done < length:
            done += self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
        if status not in statuses:
            raise RuntimeError(f"{head.splitlines()[0]}: {status} {bytes(view[:500])!r}")
        return view

    def put(self, path: str, body: memoryview) -> None:
        self.ask(f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {body.nbytes}\r\n\r\n", body)

    def get(self, path: str) -> memoryview:
        return self.ask(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def post(self, path: str, plain: object) -> None:
        body = json.dumps(plain).encode()
        self.ask(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n", memoryview(body))

    def delete(self, path: str) -> None:
        self._socket.sendall(f"DELETE {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        self._socket.recv(16 << 10)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def each(port: int, streams: int, count: int, work: Callable[[Connection, int], object]) -> float:
    """Return the seconds of ``work`` on ``count`` chunks, shared by ``streams`` connections."""
    numbers = iter(range(count))
    lock = threading.Lock()

    def stream() -> None:
        connection = Connection(port)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                break
            work(connection, number)
        connection.close()

    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        for one in [pool.submit(stream) for _ in range(streams)]:
            one.result()
    return time.perf_counter() - began


@contextmanager
def stall_watch(port: int) -> Iterator[list[float]]:
    """Measure the seconds of ``/healthz``, asked in a loop by a process of its own."""
    found: list[float] = []
    command = [sys.executable, __file__, "--watch", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.PIPE) as watch:
        assert watch.stdout is not None
        watch.stdout.readline()
        yield found
        out, _ = watch.communicate("\n")
        found += [float(line) for line in out.split()]


async def watch(port: int) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(None, sys.stdin.readline)
    times = []
    print("ready", flush=True)
    async with aiohttp.ClientSession() as http:
        while not ended.done():
            began = time.perf_counter()
            async with http.get(f"http://127.0.0.1:{port}/healthz") as answer:
                await answer.read()
            times.append(time.perf_counter() - began)
            await asyncio.sleep(0.002)
    print("\n".join(f"{one:.6f}" for one in sorted(times)))


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def declare(port: int, pack: memoryview, name: str, step: int) -> tuple[list[memoryview], list[bytes], list[str]]:
    """Begin the upload of ``pack``. Return its chunks, their digests, and their paths."""
    chunks = [pack[start : start + CHUNK_BYTES] for start in range(0, len(pack), CHUNK_BYTES)]
    digests = [chunk_digest(chunk) for chunk in chunks]
    content = msgpack.packb([["tensor", 0], [["uint8", [len(pack)], None, 0, 0, None]], [len(pack)]])
    control = Connection(port)
    control.post(CHECKPOINTS, {"id": name, "step": step})
    control.put(f"{CHECKPOINTS}/{name}/manifest", memoryview(pack_envelope(Origin(name), content, b"".join(digests))))
    control.close()
    return chunks, digests, [f"/v1/chunks/{digest.hex()}" for digest in digests]


def delete(port: int, name: str) -> None:
    control = Connection(port)
    control.delete(f"{CHECKPOINTS}/{name}")
    control.close()


def upload(port: int, pack: memoryview, streams: int, name: str) -> tuple[float, Callable[[], float]]:
    """Upload a state. Return the seconds, and a function that reads it and returns its own seconds."""
    chunks, digests, paths = declare(port, pack, name, 1)

    def fetch(connection: Connection, number: int) -> None:
        assert chunk_digest(connection.get(paths[number] + "?wait=60")) == digests[number]

    seconds = each(port, streams, len(chunks), lambda one, n: one.put(paths[n], chunks[n]))
    return seconds, lambda: each(port, streams, len(chunks), fetch)


def measure(port: int, pack: memoryview, streams: int, name: str, relay: psutil.Process) -> dict[str, float]:
    figures = {"bytes": float(len(pack))}
    with stall_watch(port) as stalls:
        spent = processor_seconds(relay)
        figures["put_seconds"], read = upload(port, pack, streams, name)
        figures["put_processor_seconds"] = processor_seconds(relay) - spent
        began = time.perf_counter()
        control = Connection(port)
        control.post(f"{CHECKPOINTS}/{name}/commit", {})
        control.close()
        figures["commit_seconds"] = time.perf_counter() - began
        spent = processor_seconds(relay)
        figures["get_seconds"] = read()
        figures["get_processor_seconds"] = processor_seconds(relay) - spent
    figures |= {"longest_answer_seconds": stalls[-1], "median_answer_seconds": statistics.median(stalls)}
    delete(port, name)
    return figures


def cut_through(port: int, pack: memoryview, streams: int, name: str) -> float:
    """Return the seconds until a reader that began first has everything that a writer uploads."""
    chunks, digests, paths = declare(port, pack, name, 2)

    def fetch(connection: Connection, number: int) -> None:
        assert chunk_digest(connection.get(paths[number] + "?wait=60")) == digests[number]

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(each, port, streams, len(chunks), fetch)
        each(port, streams, len(chunks), lambda one, n: one.put(paths[n], chunks[n]))
        seconds = reading.result()
    delete(port, name)
    return seconds


@contextmanager
def running_relay(*flags: str) -> Iterator[tuple[psutil.Process, int]]:
    """Yield the process of a relay, and its port."""
    command = [sys.executable, "-m", "keepstep_cli", "relay", "--bind", "127.0.0.1:0", "--log-level", "error", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
        try:
            assert relay.stdout is not None
            yield psutil.Process(relay.pid), int(relay.stdout.readline().rsplit(":", 1)[1])
        finally:
            relay.terminate()


def rounds(flags: argparse.Namespace, folder: str | None) -> list[dict[str, float]]:
    found = []
    with running_relay("--memory", "12GiB", *(["--data-dir", folder] if folder else [])) as (relay, port):
        for number in range(flags.rounds):
            pack = memoryview(os.urandom(flags.mebibytes << 20))
            figures = measure(port, pack, flags.streams, f"round-{number}", relay)
            pack = memoryview(os.urandom(flags.mebibytes << 20))
            figures["cut_through_seconds"] = cut_through(port, pack, flags.streams, f"through-{number}")
            found.append(figures)
            show(figures)
    return found


def show(figures: dict[str, float]) -> None:
    per_gib = 2**30 / figures["bytes"]
    rates = [
        f"{what} {figures['bytes'] / figures[f'{what}_seconds'] / 1e9:.2f} GB/s"
        for what in ("put", "get", "cut_through")
    ]
    print(
        *rates,
        f"commit {figures['commit_seconds'] * 1000:.0f} ms",
        f"relay's processor, s/GiB: put {figures['put_processor_seconds'] * per_gib:.2f}",
        f"get {figures['get_processor_seconds'] * per_gib:.2f}",
        f"slowest answer {figures['longest_answer_seconds'] * 1000:.0f} ms",
        f"(median {figures['median_answer_seconds'] * 1000:.1f} ms)",
        sep="  ",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data-dir", type=Path, help="data folder of the relay; default: none, memory only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--watch", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.watch:
        asyncio.run(watch(flags.watch))
        return
    with contextlib.ExitStack() as stack:
        folder = None
        if flags.data_dir:
            flags.data_dir.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=flags.data_dir))
        found = rounds(flags, folder)
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
