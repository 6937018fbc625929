"""Sends the copies of this rank to its keepers, in a thread of its own."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.one_copy.copies.frames import NOTHING, CopyError, Frames, Stored, connect, packed_state
from keepstep.one_copy.copies.rank_state import RankState
from keepstep.one_copy.core.holding import State
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.threads.starting import ThreadPoolExecutor

log = get_logger("keepstep.one_copy")

LOG_SHARE = 1.2
"""A keeper needs memory for a base, and for a log of this many times as many bytes."""


@dataclass(frozen=True)
class Membership:
    """A rank in a world, whose copies are sent."""

    world: int
    """Number of the world."""
    rank: int
    quorum_id: int
    """Of the quorum in which it took its place. A keeper takes no more copies from those of earlier quorums."""


class CopySender:
    """The copies of one rank.

    Between ``begin`` and the end of ``finish`` the parameters and the state of the optimizer must not change, except
    by an optimizer that cannot be replayed.

    Args:
        token: of the job.
        timeout: longest time without progress of a keeper, seconds.
        ended: returns why waits for keepers end early; empty: they go on.
    """

    def __init__(self, token: ClientToken, timeout: float, ended: Callable[[], str]) -> None:
        self._state: RankState | None = None
        self._whole = False
        self._token = token
        self._timeout = timeout
        self._outer = ended
        self._ended = ""
        self._links: dict[str, Frames] = {}
        self._next = 0
        """Slice whose base is sent in the next step."""
        self._fill = False
        self.exposed: dict[str, str] = {}
        """Keepers that have no copies, by name, and the reason."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keepstep-copying")
        self._sending: concurrent.futures.Future[None] | None = None

    def connect(
        self, tensors: RankState, member: Membership, keepers: Mapping[str, tuple[str, bool]], *, whole: bool
    ) -> None:
        """Connect to the keepers of this rank, in place of those before.

        Args:
            tensors: model and optimizer of this rank.
            member: this rank.
            keepers: by name, ``host:port`` of each, and whether it needs a whole base.
            whole: send the state after each step, and not its gradients: the optimizer cannot be replayed.

        Raises:
            CopyError: a keeper does not answer.
        """
        self.disconnect()
        self._ended = ""
        self._state, self._whole = tensors, whole
        self._fill = any(fill for _, fill in keepers.values())
        self.exposed = {}
        need, boxes = round(tensors.nbytes * (1 + LOG_SHARE)), tensors.boxes
        for name, (address, _) in keepers.items():
            link = connect(address, self._token, self._timeout, self._reason)
            # One stream goes to all keepers, so that all are filled if one of them needs it.
            hello = {
                "kind": "own",
                "world": member.world,
                "rank": member.rank,
                "quorum": member.quorum_id,
                "names": tensors.names_of_slices(),
                "need": need,
                "boxes": boxes,
                "whole": whole,
                "fill": self._fill,
            }
            try:
                link.send(hello, limit=self._timeout)
                answer, _ = link.receive(self._timeout)
            except BaseException:
                link.close()
                raise
            if answer["kind"] == "begun":
                self._links[name] = link
                continue
            link.close()
            self.exposed[name] = str(answer.get("reason"))
            log.warning("keeper refuses copies", keeper=name, reason=self.exposed[name])

    def _reason(self) -> str:
        return self._ended or self._outer()

    def begin(self, state: State, end: Callable[[], dict[str, Any]]) -> None:
        """Begin to send bases at ``state``, which was committed: all of them to a new keeper, else one.

        Args:
            state: of this rank.
            end: returns options, buffers and random state of ``state``, for a new keeper.
        """
        if not self._links or self._state is None:
            return
        fill, self._fill = self._fill, False
        count = len(self._state.slices)
        due = range(count) if fill else [] if self._whole else [self._next % count]
        self._next += 1
        last = packed_state(end()) if fill else None  # the passes change buffers
        self._sending = self._pool.submit(self._send_bases, self._state, state, list(due), last)

    def _send_bases(self, tensors: RankState, state: State, due: list[int], end: Stored | None) -> None:
        if self._whole and end is None:
            self._send("commit", state)
        for number in due:
            self._send("base", state, packed_state(tensors.base(number)), number)
        if end is not None:
            self._send("end", state, end)
            self._confirm(state)

    def finish(self, state: State, end: dict[str, Any], ahead: Callable[[int], Stored] | None = None) -> None:
        """Send the step that leads to ``state``, and wait until all keepers have it.

        Args:
            state: after the step.
            end: options with which the optimizer steps; buffers and random state after the passes.
            ahead: returns the state of each slice after the step; None: gradients are sent.

        Raises:
            CopyError: a keeper is lost, or ``interrupt`` was called.
        """
        if not self._links or self._state is None:
            return
        last = self._pool.submit(self._send_step, self._state, state, end, ahead)
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

    def _send_step(
        self, tensors: RankState, state: State, end: dict[str, Any], ahead: Callable[[int], Stored] | None
    ) -> None:
        for number in range(len(tensors.slices)):
            if ahead is not None:
                part = ahead(number)
            else:
                part = packed_state({} if end["skipped"] else tensors.gradients(number))
            self._send("gradients", state, part, number)
        self._send("end", state, packed_state(end))
        self._confirm(state)

    def _send(self, part: str, state: State, content: Stored = (b"", NOTHING), number: int = 0) -> None:
        header: dict[str, Any] = {"part": part, "step": state.step, "lineage": state.lineage, "slice": number}
        header["manifest"], pack = content
        for link in self._links.values():
            link.send(header, pack, limit=self._timeout)

    def _confirm(self, state: State) -> None:
        for name, link in self._links.items():
            answer, _ = link.receive(self._timeout)
            if answer.get("kind") != "kept" or (answer["step"], answer["lineage"]) != (state.step, state.lineage):
                raise CopyError(f"keeper {name} does not confirm step {state.step}: {answer.get('reason', answer)}")

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
        self._links, self._state = {}, None

    def close(self) -> None:
        """End the connections and the thread."""
        self.disconnect()
        self._pool.shutdown(wait=True)
