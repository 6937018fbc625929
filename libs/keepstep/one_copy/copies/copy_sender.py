"""Sends the copies of this rank to its keepers, in a thread of its own."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any

from keepstep.one_copy.copies.frames import CopyError, Frames, connect, packed_state
from keepstep.one_copy.copies.rank_state import RankState
from keepstep.one_copy.core.holding import State
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.threads.starting import ThreadPoolExecutor

log = get_logger("keepstep.one_copy")

LOG_SHARE = 1.2
"""A keeper needs memory for a base, and for a log of this many times as many bytes."""


class CopySender:
    """The copies of one rank.

    Between ``begin`` and the end of ``finish`` the parameters and the state of the optimizer must not change.

    Args:
        state: model and optimizer of this rank.
        whole: send the state after each step, and not its gradients: the optimizer cannot be replayed.
        token: of the job.
        timeout: longest time without progress of a keeper, seconds.
    """

    def __init__(self, state: RankState, *, whole: bool, token: ClientToken, timeout: float) -> None:
        self.tensors = self._state = state
        self._whole = whole
        self._token = token
        self._timeout = timeout
        self._ended = ""
        self._links: dict[str, Frames] = {}
        self._next = 0
        """Slice whose base is sent in the next step."""
        self._fill = False
        self.exposed: dict[str, str] = {}
        """Keepers that have no copies, and the reason."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keepstep-copying")
        self._sending: concurrent.futures.Future[None] | None = None

    def connect(self, world: int, rank: int, keepers: Mapping[str, bool]) -> None:
        """Connect to the keepers of this rank, in place of those before.

        Args:
            world: number of the world.
            rank: in that world.
            keepers: ``host:port`` of each, and whether it needs a whole base.

        Raises:
            CopyError: a keeper does not answer.
        """
        self.disconnect()
        self._ended = ""
        self._fill = any(keepers.values())
        self._next = 0
        self.exposed = {}
        need, boxes = self._need(), self._state.boxes()
        for address in keepers:
            link = connect(address, self._token, self._timeout, lambda: self._ended)
            slices = len(self._state.slices)
            # One stream goes to all keepers, so that all are filled if one of them needs it.
            hello = {"kind": "own", "world": world, "rank": rank, "slices": slices, "need": need, "boxes": boxes}
            link.send({**hello, "whole": self._whole, "fill": self._fill}, limit=self._timeout)
            answer, _ = link.receive(self._timeout)
            if answer["kind"] == "begun":
                self._links[address] = link
                continue
            link.close()
            self.exposed[address] = str(answer.get("reason"))
            log.warning("keeper refuses copies", keeper=address, reason=self.exposed[address])

    def _need(self) -> int:
        return round(self._state.nbytes * (1 + LOG_SHARE))

    def begin(self, state: State, end: Callable[[], dict[str, Any]]) -> None:
        """Begin to send bases at ``state``, which was committed: all of them to a new keeper, else one.

        Args:
            state: of this rank.
            end: returns options, buffers and random state of ``state``, for a new keeper.
        """
        if not self._links:
            return
        fill, self._fill = self._fill, False
        count = len(self._state.slices)
        due = range(count) if fill else [] if self._whole else [self._next % count]
        self._next += 1
        last = end() if fill else None
        self._sending = self._pool.submit(self._send_bases, state, list(due), last)

    def _send_bases(self, state: State, due: list[int], end: dict[str, Any] | None) -> None:
        if self._whole:
            self._send("commit", state)
        for number in due:
            self._send("base", state, self._state.base(number), number)
        if end is not None:
            self._send("end", state, end)
            self._confirm(state)

    def finish(self, state: State, end: dict[str, Any]) -> None:
        """Send the step that leads to ``state``, and wait until all keepers have it.

        Args:
            state: after the step.
            end: options with which the optimizer steps; buffers and random state after the passes.

        Raises:
            CopyError: a keeper is lost, or ``interrupt`` was called.
        """
        if not self._links:
            return
        last = self._pool.submit(self._send_step, state, end)
        for future in (self._sending, last):
            while future is not None and not future.done():
                concurrent.futures.wait([future], 0.5)
        for future in (self._sending, last):
            if future is not None:
                future.result()

    def filled(self) -> None:
        """Wait until all keepers have a whole base. CopyError: as ``finish``."""
        if self._sending is not None:
            self._sending.result()

    def _send_step(self, state: State, end: dict[str, Any]) -> None:
        for number in range(len(self._state.slices)):
            part = self._state.base(number) if self._whole else self._state.gradients(number)
            self._send("gradients", state, part, number)
        self._send("end", state, end)
        self._confirm(state)

    def _send(self, part: str, state: State, content: Any = None, number: int = 0) -> None:
        header: dict[str, Any] = {"part": part, "step": state.step, "lineage": state.lineage, "slice": number}
        pack = memoryview(b"")
        if content is not None:
            header["manifest"], pack = packed_state(content)
        for link in self._links.values():
            link.send(header, pack, limit=self._timeout)

    def _confirm(self, state: State) -> None:
        for address, link in self._links.items():
            answer, _ = link.receive(self._timeout)
            if answer.get("kind") != "kept" or (answer["step"], answer["lineage"]) != (state.step, state.lineage):
                raise CopyError(f"keeper {address} does not confirm step {state.step}: {answer.get('reason', answer)}")

    def interrupt(self, reason: str) -> None:
        """End all waits for keepers. From any thread."""
        self._ended = reason

    def disconnect(self) -> None:
        """End the connections, and wait for the thread that sends."""
        self._ended = self._ended or "disconnected"
        for link in self._links.values():
            link.close()
        if self._sending is not None:
            concurrent.futures.wait([self._sending])
            self._sending = None
        self._links = {}

    def close(self) -> None:
        """End the connections and the thread."""
        self.disconnect()
        self._pool.shutdown(wait=True)
