"""Sends the copies of this rank to its keepers, in a thread of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.one_copy.copies.early_gradients import EarlyGradients
from keepstep.one_copy.copies.frames import CopyError, Frames, connect, send_state, send_unsealed
from keepstep.one_copy.copies.kept_bytes import TensorPack, pack_of_gradients, pieces_of
from keepstep.one_copy.copies.rank_state import RankState
from keepstep.one_copy.core.holding import State
from keepstep.runtime.devices import queued_work
from keepstep.state.pack import Pack
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.manifest import chunk_digests
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.threads.starting import ThreadPoolExecutor

log = get_logger("keepstep.one_copy")

LOG_SHARE = 1.2
"""A keeper needs memory for a base, and for a log of this many times as many bytes."""


KEEPER_AGAIN_SECONDS = 5.0
"""A keeper that had no memory is asked again after this time."""
KEEPER_ANSWER_SECONDS = 5.0
"""Limit of its answer."""


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
        """First slice whose base is sent in the next step."""
        self._part = 0.0
        """Part of a base that is due beside whole ones."""
        self._fill = False
        self.exposed: dict[str, str] = {}
        """Keepers that have no copies, by name, and the reason."""
        self._hello: dict[str, Any] = {}
        self._addresses: dict[str, str] = {}
        self._filling: set[str] = set()
        """Keepers of ``exposed`` that are filled now."""
        self._asked_at = 0.0
        """When those without copies were asked last; monotonic seconds."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keepstep-copying")
        self._tasks: list[concurrent.futures.Future[None]] = []
        """Of this attempt, in order. One thread works on them."""
        self._early: EarlyGradients | None = None
        self._following = State(0, 0)
        self._sent: dict[int, bytes] = {}
        """Slices whose gradients were sent in the backward pass, and the description of these."""

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
        self._hello = {
            "kind": "own",
            "world": member.world,
            "rank": member.rank,
            "quorum": member.quorum_id,
            "names": tensors.names_of_slices(),
            "need": round(tensors.nbytes * (1 + LOG_SHARE)),
            "boxes": tensors.boxes,
            "whole": whole,
        }
        self._addresses = {name: address for name, (address, _) in keepers.items()}
        # One stream goes to all keepers, so that all are filled if one of them needs it.
        for name in keepers:
            self._open(name, {"fill": self._fill, "again": False}, self._timeout)
        self._asked_at = time.monotonic()
        if keepers and not whole:
            self._early = EarlyGradients(tensors, self._gradients_came)

    def _open(self, name: str, more: dict[str, Any], limit: float) -> None:
        """Connect to a keeper. CopyError: it does not answer."""
        link = connect(self._addresses[name], self._token, limit, self._reason)
        try:
            link.send({**self._hello, **more}, limit=limit)
            answer = link.receive(limit)
        except BaseException:
            link.close()
            raise
        if answer["kind"] == "begun":
            self._links[name] = link
            if answer["due"] is None:
                self._fill = True
            else:
                self._next = answer["due"]
            return
        link.close()
        self._expose(name, str(answer.get("reason")))

    def _expose(self, name: str, reason: str) -> None:
        if name not in self.exposed:
            log.warning("keeper has no copies", keeper=name, reason=reason)
        self.exposed[name] = reason

    def _ask_again(self) -> None:
        """Ask keepers that have no copies again, from time to time."""
        if not self.exposed or self._ended or time.monotonic() - self._asked_at < KEEPER_AGAIN_SECONDS:
            return
        self._stop_tasks()  # they use the links
        for name in list(self.exposed):
            with contextlib.suppress(CopyError):  # the lighthouse finds whether it is lost
                self._open(name, {"fill": True, "again": True}, min(self._timeout, KEEPER_ANSWER_SECONDS))
            if name in self._links:
                log.info("keeper gets copies again", keeper=name)
                self._fill = True
                self._filling.add(name)
        self._asked_at = time.monotonic()

    def _reason(self) -> str:
        return self._ended or self._outer()

    def begin(self, state: State, end: Callable[[], dict[str, Any]], following: State) -> None:
        """Begin to send a step: bases at ``state``, and gradients as soon as they come in the backward pass.

        Args:
            state: of this rank, which was committed.
            end: returns options, buffers and random state of ``state``, for a new keeper.
            following: the state to which the step leads.
        """
        self._ask_again()
        if not self._links or self._state is None:
            return
        self._stop_tasks()
        self._following = following
        if self._early is not None:
            self._early.begin()
        if self._fill:
            self.fill(state, end)
        else:
            self._submit(self._send_bases, self._state, state, [] if self._whole else self._due(self._state), None)

    def fill(self, state: State, end: Callable[[], dict[str, Any]]) -> None:
        """Begin to send the bases of all slices at ``state``. Arguments as of ``begin``."""
        if not self._links or self._state is None:
            return
        self._fill = False
        last = copy.deepcopy(end())  # the passes change buffers
        self._submit(self._send_bases, self._state, state, range(len(self._state.slices)), last)

    def _due(self, tensors: RankState) -> list[int]:
        """Return the slices whose bases are sent in this step."""
        count, first = len(tensors.slices), self._next
        whole = int(self._part + tensors.slices_per_step)
        self._part += tensors.slices_per_step - whole
        self._next = (first + whole) % max(1, count)
        return [(first + one) % count for one in range(min(whole, count))]

    def _send_bases(self, tensors: RankState, state: State, due: Iterable[int], end: dict[str, Any] | None) -> None:
        if self._whole and end is None:
            self._send("commit", state)
        for number in due:
            self._send_state("base", state, tensors.base(number), number)
        if end is not None:
            self._send_state("end", state, end)
            self._confirm(state)

    def _gradients_came(self, numbers: list[int]) -> None:
        """Send the gradients of some slices now, in the backward pass."""
        if self._state is not None and self._links:
            self._submit(self._send_early, self._state, self._following, numbers)

    def _send_early(self, tensors: RankState, state: State, numbers: list[int]) -> None:
        packs = [pack_of_gradients(tensors.gradients(number)) for number in numbers]
        header = {"part": "early", "step": state.step, "lineage": state.lineage, "slices": numbers}
        send_unsealed(self._links.values(), header, packs, limit=self._timeout)
        self._sent.update(zip(numbers, (one.content_bytes for one in packs), strict=True))

    def finish(self, state: State, end: dict[str, Any]) -> None:
        """Send the step that leads to ``state``, and wait until all keepers have it.

        Args:
            state: after the step.
            end: options with which the optimizer steps; buffers and random state after the passes.

        Raises:
            CopyError: a keeper is lost, or ``interrupt`` was called.
        """
        if not self._links or self._state is None:
            return
        self._submit(self._send_step, self._state, state, end)
        self.filled()

    def filled(self) -> None:
        """Wait until all that was begun is sent, and bases are confirmed. CopyError: as ``finish``."""
        for one in self._tasks:
            one.result()
        self._tasks = []

    def _send_step(self, tensors: RankState, state: State, end: dict[str, Any]) -> None:
        def send(number: int) -> None:
            if self._whole:
                self._send_state("gradients", state, tensors.base(number), number)
            else:
                pack = pack_of_gradients({} if end["skipped"] else tensors.gradients(number))
                self._send_state("gradients", state, None, number, pack)

        sent, self._sent = self._sent, {}
        sealed: dict[int, bytes] = {}
        for number, content in sent.items():
            pack = pack_of_gradients({} if end["skipped"] else tensors.gradients(number))
            if pack.content_bytes == content:
                sealed[number] = chunk_digests(pieces_of(pack))
        if sealed:
            self._send("seal", state, digests=list(sealed.items()))
        for number in range(len(tensors.slices)):
            if number not in sealed:
                send(number)
        self._send_state("end", state, end)
        changed = self._confirm(state)
        if self._early is not None:
            self._early.end(changed=bool(changed) or len(sealed) < len(sent))
        if changed:
            for number in sorted(changed):
                send(number)
            self._send_state("end", state, end)
            self._confirm(state)

    def _submit(self, run: Callable[..., None], *arguments: Any) -> None:
        wait = queued_work(self._state.device) if self._state is not None else None

        def follow() -> None:
            if wait is not None:
                wait()  # the optimizer, for a base: the stream of the training need not be that of this thread
            run(*arguments)

        self._tasks.append(self._pool.submit(follow))

    def _stop_tasks(self) -> None:
        """Forget tasks of an attempt that was dropped, and wait for the one that runs."""
        tasks, self._tasks = self._tasks, []
        for one in tasks:
            one.cancel()
        concurrent.futures.wait(tasks)
        self._sent = {}

    def _send(self, part: str, state: State, **more: Any) -> None:
        for link in self._links.values():
            link.send({"part": part, "step": state.step, "lineage": state.lineage, **more}, limit=self._timeout)

    def _send_state(
        self, part: str, state: State, content: Any, number: int = 0, pack: TensorPack | Pack | None = None
    ) -> None:
        header = {"part": part, "step": state.step, "lineage": state.lineage, "slice": number}
        send_state(self._links.values(), header, content, limit=self._timeout, pack=pack)

    def _confirm(self, state: State) -> set[int]:
        """Wait for the keepers, and drop those without memory. Return slices that have changed since they were sent."""
        changed: set[int] = set()
        for name, link in list(self._links.items()):
            answer = link.receive(self._timeout)
            if answer.get("kind") == "full":
                del self._links[name]
                link.close()
                self._expose(name, str(answer.get("reason")))
            elif answer.get("kind") == "changed":
                changed |= set(answer["slices"])
            elif answer.get("kind") != "kept" or (answer["step"], answer["lineage"]) != (state.step, state.lineage):
                raise CopyError(f"keeper {name} does not confirm step {state.step}: {answer.get('reason', answer)}")
            elif name in self._filling:
                self._filling.discard(name)
                self.exposed.pop(name, None)
        return changed

    def interrupt(self, reason: str) -> None:
        """End all waits for keepers. From any thread."""
        self._ended = reason

    def disconnect(self) -> None:
        """End the connections, and wait for the thread that sends."""
        self._ended = self._ended or "disconnected"
        for link in self._links.values():
            link.close()
        if self._early is not None:
            self._early.close()
            self._early = None
        self._stop_tasks()
        self._links, self._state = {}, None
        self._filling.clear()

    def close(self) -> None:
        """End the connections and the thread."""
        self.disconnect()
        self._pool.shutdown(wait=True)
