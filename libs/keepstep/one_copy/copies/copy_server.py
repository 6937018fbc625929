"""Takes copies from the ranks that this process keeps, and serves shards to ranks that take them over."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from keepstep.one_copy.copies.frames import MAX_HELLO_BYTES, POLL_SECONDS, CopyError, Frames, send_state
from keepstep.one_copy.copies.keeper import Keeper
from keepstep.one_copy.copies.owner import Owner
from keepstep.one_copy.copies.rank_state import Boxes
from keepstep.one_copy.core.holding import State
from keepstep.transfer.direct.sending.http_server import listen
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.fork_safety import claim
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.threads.starting import Thread, ThreadPoolExecutor

log = get_logger("keepstep.one_copy")

HELLO_SECONDS = 10.0
READS = 1 << 62
KEPT_SLICES = 4
"""Rebuilt slices that wait for a further reader. On a GPU a slice is kept only while it is sent."""
Cuts = dict[str, list[list[int]]]
"""For a parameter by name: first index and number of elements in each dimension of the shard, to read a part of it."""


@dataclass(frozen=True)
class Served:
    """The shard of this process, which does not change while it is served."""

    world: int
    """Number of its world."""
    rank: int
    state: State
    names: list[list[str]]
    """Of the parameters of each slice."""
    slice_of: Callable[[int], dict[str, Any]]
    """Returns the state of a slice by its number."""
    end: dict[str, Any]
    """Options, buffers and random state."""
    shared: dict[str, Any]
    """State that all ranks have in common."""
    boxes: Boxes


class RebuiltSlices:
    """The slices of a copy, for several ranks that read it at the same time. Each is rebuilt once, if they keep up.

    Args:
        pool: rebuilds a slice while the one before it is sent.
        rebuild: returns a slice by its number.
        count: number of slices.
        kept: number of slices in memory at once.
    """

    def __init__(
        self, pool: ThreadPoolExecutor, rebuild: Callable[[int], dict[str, Any]], count: int, kept: int
    ) -> None:
        self._pool = pool
        self._rebuild = rebuild
        self._count = count
        self._kept = kept
        self._lock = threading.Lock()
        self._begun: dict[int, concurrent.futures.Future[dict[str, Any]]] = {}

    def __call__(self, number: int) -> dict[str, Any]:
        """Return a slice. CopyError: it cannot be rebuilt, for those that read it now."""
        ahead = min(2, self._kept)
        with self._lock:
            for one in range(number, min(number + ahead, self._count)):
                if one not in self._begun:
                    self._begun[one] = self._pool.submit(self._rebuild, one)
            found = self._begun[number]
            while len(self._begun) > self._kept:
                del self._begun[next(iter(self._begun))]
        try:
            return found.result()
        except BaseException:  # its traceback has this object, so that the next recovery would find it too
            with self._lock:
                self._begun = {key: one for key, one in self._begun.items() if one is not found}
            raise


def slices_of(served: Served, cuts: Cuts | None) -> Iterator[dict[str, Any]]:
    """Yield the state of the parameters of each slice; with ``cuts`` only these parts."""
    for number, names in enumerate(served.names):
        if cuts is None:
            yield served.slice_of(number)
        elif any(name in cuts for name in names):
            yield {name: _cut(one, cuts[name]) for name, one in served.slice_of(number).items() if name in cuts}


class CopyServer:
    """Listens on a port of its own, with a thread for each connection.

    Args:
        host: address to listen on.
        token: of the job.
        keeper: of the copies.
        timeout: longest time without progress of a peer, and longest wait of a reader for a shard; seconds.
    """

    def __init__(self, host: str, token: ClientToken, keeper: Keeper, timeout: float) -> None:
        self._token = token
        self._keeper = keeper
        self._timeout = timeout
        self._changed = threading.Condition()
        self._served: Served | None = None
        self._closed = False
        self._open: dict[Frames, int] = {}
        """Connections, and the quorum_id of those that bring copies; of others one that never ends."""
        self._listener = listen(host)
        self._listener.settimeout(POLL_SECONDS)
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"
        """``host:port`` that peers connect to."""
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="keepstep-rebuilding")
        self._rebuilt: weakref.WeakValueDictionary[tuple[int, int, State], RebuiltSlices] = (
            weakref.WeakValueDictionary()
        )
        """Of the copies that are read now."""
        self._threads: list[Thread] = []
        self._thread = Thread(target=self._accept, name="keepstep-copies", daemon=True)
        self._thread.start()

    def serve(self, served: Served | None) -> None:
        """Serve this shard from now on; None: wait for one."""
        with self._changed:
            self._served = served
            self._changed.notify_all()

    def end_copies_before(self, quorum_id: int) -> None:
        """Close connections of owners that took their place in an earlier quorum: they may be frozen, or cut off."""
        for frames, begun in self._open.copy().items():
            if begun < quorum_id:
                frames.close()

    def close(self) -> None:
        """End all connections and threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join_or_end_process()
        self._listener.close()
        for frames in list(self._open):
            frames.close()
        for thread in self._threads:
            thread.join_or_end_process()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _accept(self) -> None:
        warnings = LogLimiter(seconds=30.0)
        while True:
            try:
                if self._closed:
                    return
                self._accept_one()
            except TimeoutError:
                continue
            except (OSError, RuntimeError) as error:  # no descriptor or thread is left, or this object is closed
                if self._closed:
                    return
                if warnings.allows(time.monotonic()):
                    log.warning("connection of copies not accepted; retrying", reason=str(error))
                time.sleep(POLL_SECONDS)  # nothing tells when one is free

    def _accept_one(self) -> None:
        connection, _ = self._listener.accept()
        claim(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frames = Frames(connection, lambda: "this process ends" if self._closed else "")
        thread = Thread(target=self._attend, args=(frames,), name="keepstep-copy", daemon=True)
        thread.start()
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def _attend(self, frames: Frames) -> None:
        self._open[frames] = READS
        try:
            header = frames.receive(HELLO_SECONDS, most=MAX_HELLO_BYTES)
            if not self._token.accepts_peer(str(header.get("authorization", ""))):
                frames.send({"kind": "refused", "reason": "wrong token"}, limit=HELLO_SECONDS)
                return
            header = frames.receive(HELLO_SECONDS)
            match header.get("kind"):
                case "own":
                    owner = Owner(self._keeper, frames, header, self._timeout)
                    self._open[frames] = owner.quorum_id
                    owner.serve()
                case "read":
                    self._send_shard(frames, header)
                case other:
                    raise CopyError(f"unknown request {other!r}")
        except (KeepstepError, KeyError, TypeError, ValueError, MemoryError) as error:
            if not self._closed:
                log.info("connection of copies ended", reason=str(error))
            with contextlib.suppress(CopyError):
                frames.send({"kind": "refused", "reason": f"{error}"}, limit=1.0)
        finally:
            self._open.pop(frames, None)
            frames.close()

    # ---- shards

    def _send_shard(self, frames: Frames, header: dict[str, Any]) -> None:
        world, rank, state = int(header["world"]), int(header["rank"]), State(header["step"], header["lineage"])
        cuts: Cuts | None = header.get("cuts")
        served = self.find(world, rank, state, copy=header["copy"])
        if header.get("boxes"):
            frames.send({"kind": "boxes", "boxes": served.boxes}, limit=self._timeout)
            return
        for part in slices_of(served, cuts):
            send_state([frames], {"kind": "slice"}, part, limit=self._timeout)
        send_state([frames], {"kind": "end"}, {"end": served.end, "shared": served.shared}, limit=self._timeout)

    def find(self, world: int, rank: int, state: State, *, copy: bool) -> Served:
        """Return a shard that this process has.

        Args:
            world: number of the world.
            rank: in that world.
            state: of the shard.
            copy: from the copies that it keeps. False: its own shard, for which this waits.

        Raises:
            CopyError: it is not here.
        """
        return self._copied(world, rank, state) if copy else self._wait_for(world, rank, state)

    def _copied(self, world: int, rank: int, state: State) -> Served:
        keeper, key = self._keeper, (world, rank, state)
        names = keeper.names_of(*key)
        with self._changed:
            slices = self._rebuilt.get(key)
            if slices is None:
                kept = KEPT_SLICES if keeper.device().type == "cpu" else 1
                slices = RebuiltSlices(self._pool, partial(keeper.rebuild, *key), len(names), kept)
                self._rebuilt[key] = slices
        return Served(
            *(*key, names),
            slice_of=slices,
            end=keeper.end_of(world, rank, state),
            shared={},
            boxes=keeper.boxes_of(world, rank),
        )

    def _wait_for(self, world: int, rank: int, state: State) -> Served:
        """Wait until this process serves that shard: it may have to go a step forward first."""
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while True:
                served = self._served
                if served is not None and (served.world, served.rank, served.state) == (world, rank, state):
                    return served
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    raise CopyError(f"rank {rank} of world {world} at step {state.step} is not here")
                self._changed.wait(left)


def _cut(one: dict[str, Any], cut: list[list[int]]) -> dict[str, Any]:
    """Return a part of the state of a parameter: of each tensor that has the shape of the parameter."""
    shape = one["parameter"].shape
    index = tuple(slice(first, first + count) for first, count in zip(*cut, strict=True))
    state = {
        key: value[index] if isinstance(value, torch.Tensor) and value.shape == shape and shape else value
        for key, value in one["state"].items()
    }
    return {"parameter": one["parameter"][index], "group": one["group"], "state": state}
