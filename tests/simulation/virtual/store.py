"""The store of the lighthouses in virtual time, behind a network that delays and loses calls.

``SharedStore`` holds the truth: keys, leases that end by its own clock, and watches. A ``StoreClient`` is the access of
one process, behind the real ``Store`` contract. A call travels to the store and back and may be lost on either way. It
then ends with an error of the contract, or never; its effect may happen, may not happen, or may happen later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from keepstep_lighthouse.leadership.campaign import LEADER_KEY
from keepstep_lighthouse.store.contract import (
    Change,
    Compare,
    OutcomeUnknownError,
    Store,
    StoreError,
    Watch,
    Write,
    WriteFailedError,
)
from tests.simulation.virtual.network import Timeline
from tests.simulation.virtual.process import ProcessLoop

EXPIRY_SECONDS = 0.5
"""The most by which a lease outlives its time to live."""
HANGS = 30.0
"""Seconds; longer than any timeout of a call."""
SLOW_ANSWER = 0.9
Written = Callable[[Sequence[Write]], None]


class SharedStore:
    """Keys, leases and watches. ``on_written`` is called with the writes of each transaction before they happen."""

    def __init__(self, time: Timeline, random: Random, on_written: Written) -> None:
        self.values: dict[str, bytes] = {}
        self.lead_until: dict[int, float] = {}
        """By lease: the true time until which the leader's key was safe with it."""
        self.away = False
        self.slow = False
        self.unsure = False
        """Some calls are lost on their way."""
        self.watches_are_late = False
        self._time, self._random = time, random
        self._on_written = on_written
        self._lease_of: dict[str, int] = {}
        self._leases: dict[int, tuple[float, float]] = {}
        """By lease: time to live, and true time of its end."""
        self._last_lease = 0
        self.watches: list[ClientWatch] = []

    def transact(self, compare: Sequence[Compare], writes: Sequence[Write]) -> bool:
        for write in writes:
            if write.lease and write.lease not in self._leases:
                raise WriteFailedError(f"{write.key} was not written: its lease is over")
        if any(self.values.get(one.key) != one.value for one in compare):
            return False
        if writes:
            self._on_written(writes)
            self._apply(writes)
        return True

    def _apply(self, writes: Sequence[Write]) -> None:
        for write in writes:
            self._lease_of.pop(write.key, None)
            if write.value is None:
                self.values.pop(write.key, None)
            else:
                self.values[write.key] = write.value
                if write.lease:
                    self._lease_of[write.key] = write.lease
                    self._lead(write.lease)
            for watch in self.watches:
                watch.changed(Change(write.key, write.value))

    def _lead(self, lease: int) -> None:
        if self._lease_of.get(LEADER_KEY) == lease:
            self.lead_until[lease] = self._leases[lease][1]

    def grant(self, ttl: float) -> int:
        self._last_lease += 1
        self._start(self._last_lease, ttl)
        return self._last_lease

    def _start(self, lease: int, ttl: float) -> None:
        ends = self._time.now + ttl
        self._leases[lease] = ttl, ends
        self._time.at(ends + EXPIRY_SECONDS * self._random.random(), self._expire, lease, ends)
        self._lead(lease)

    def _expire(self, lease: int, ends: float) -> None:
        if lease in self._leases and self._leases[lease][1] == ends:
            self.revoke(lease)

    def keep_alive(self, lease: int) -> None:
        if lease not in self._leases:
            raise WriteFailedError(f"lease {lease} is over")
        self._start(lease, self._leases[lease][0])

    def revoke(self, lease: int) -> None:
        self._leases.pop(lease, None)
        gone = [Write(key, None) for key, owner in self._lease_of.items() if owner == lease]
        if gone:
            self._on_written(gone)
            self._apply(gone)

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def get_prefix(self, prefix: str) -> dict[str, bytes]:
        return {key: self.values[key] for key in sorted(self.values) if key.startswith(prefix)}

    def report_missed(self) -> None:
        """Some process reaches the store again: its watches catch up, or break."""
        for watch in self.watches:
            watch.on_reachable()

    def delay(self) -> float:
        """Seconds of one way to the store."""
        return (0.05 + 1.2 * self._random.random()) if self.slow else 0.0005 + 0.008 * self._random.random()


class ClientWatch(Watch):
    """Reports changes in order, each after a delay, and none while the process is cut off from the store."""

    def __init__(self, client: StoreClient, prefix: str) -> None:
        super().__init__(prefix)
        self._client = client
        self._arrives = 0.0
        self._missed = False
        self.everything()

    def everything(self) -> None:
        for key, value in self._client.shared.get_prefix(self.prefix).items():
            self.changed(Change(key, value))

    def changed(self, change: Change) -> None:
        client = self._client
        if self.ended or not change.key.startswith(self.prefix):
            return
        if client.unreachable or client.deaf:
            self._missed = True
            return
        delay = 0.001 + 0.01 * client.random.random()
        if client.shared.watches_are_late:
            delay += 3.0 * client.random.random()
        self._arrives = max(self._arrives, client.time.now + delay)
        client.time.at(self._arrives, self._deliver, change)

    def _deliver(self, change: Change) -> None:
        if not self._client.loop.dead:
            self._client.loop.deliver(self.tell, (change,))

    def on_reachable(self) -> None:
        """Report the present values of all missed keys, or break."""
        if self._missed and not self.ended:
            self._missed = False
            if self._client.random.random() < 0.5:
                self.breaks()
            else:
                known = self._client.shared.get_prefix(self.prefix)
                self.changed(Change(LEADER_KEY, known.get(LEADER_KEY)))
                self.everything()

    def breaks(self) -> None:
        if not self.ended and not self._client.loop.dead:
            self._client.loop.call_soon(self.end, StoreError("the watch broke"))


class StoreClient(Store):
    """The access of one process. ``exclusive``: no other lighthouse uses the store."""

    def __init__(
        self, shared: SharedStore, loop: ProcessLoop, time: Timeline, random: Random, *, exclusive: bool
    ) -> None:
        self.exclusive = exclusive
        self.shared, self.loop = shared, loop
        self.time, self.random = time, random
        self.cut_off = False
        self.deaf = False
        """Its watches report nothing."""
        self.fates: dict[str, str] = {}
        """By the name of a method of ``SharedStore``: the fate of its next call. ``lost``: it never arrives. ``done``:
        it happens, and its answer is lost. ``late``: it happens later. ``slow``: the answer takes 0.9 s. ``hangs``."""

    @property
    def unreachable(self) -> bool:
        return self.cut_off or self.shared.away

    async def get(self, key: str) -> bytes | None:
        return await self._call(self.shared.get, key)  # type: ignore[no-any-return]

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        return await self._call(self.shared.get_prefix, prefix)  # type: ignore[no-any-return]

    async def transact(self, compare: Sequence[Compare], writes: Sequence[Write]) -> bool:
        return await self._call(self.shared.transact, tuple(compare), tuple(writes), changes=bool(writes))  # type: ignore[no-any-return]

    async def grant_lease(self, ttl: float) -> int:
        return await self._call(self.shared.grant, ttl, changes=True)  # type: ignore[no-any-return]

    async def keep_alive(self, lease: int) -> None:
        await self._call(self.shared.keep_alive, lease, changes=True)

    async def revoke(self, lease: int) -> None:
        await self._call(self.shared.revoke, lease, changes=True)

    def watch(self, prefix: str) -> Watch:
        watch = ClientWatch(self, prefix)
        self.shared.watches = [*(one for one in self.shared.watches if not one.ended), watch]
        return watch

    async def close(self) -> None:
        """Free nothing: the client holds nothing."""

    async def _call(self, act: Callable[..., Any], *args: Any, changes: bool = False) -> Any:
        if self.loop.dead:
            raise StoreError("this process is dead")
        call = _Call(self, act, args, changes=changes)
        self.time.after(self.shared.delay(), call.arrives)
        return await call.answer


class _Call:
    """A call on its way to the store or back."""

    def __init__(self, client: StoreClient, act: Callable[..., Any], args: tuple[Any, ...], *, changes: bool) -> None:
        self._client, self._act, self._args = client, act, args
        self._changes = changes
        self.answer: Any = client.loop.create_future()

    def arrives(self) -> None:
        client, random = self._client, self._client.random
        fate = client.fates.pop(self._act.__name__, "") if self._changes else ""
        if client.unreachable:
            fate = fate or random.choice(("refused", "lost", "hangs"))
        elif client.shared.unsure and not fate:
            fate = random.choice(("", "", "refused", "lost", "done", "late", "hangs"))
        if client.loop.dead and random.random() < 0.5:
            return  # the call died with the process
        if fate == "late":
            client.time.after(3.0 * random.random(), self._carry_out, None)
        elif fate in ("", "done", "slow"):
            self._carry_out(None if fate == "done" else SLOW_ANSWER if fate else client.shared.delay())
        if fate not in ("", "slow"):
            wait = HANGS if fate == "hangs" else 0.3 * random.random()
            client.time.after(wait, self._fail, fate)

    def _carry_out(self, answered_after: float | None) -> None:
        try:
            result, error = self._act(*self._args), None
        except StoreError as raised:
            result, error = None, raised
        if answered_after is not None:
            self._client.time.after(answered_after, self._comes_back, result, error)

    def _comes_back(self, result: Any, error: StoreError | None) -> None:
        if self._client.unreachable:
            self._client.time.after(0.3 * self._client.random.random(), self._fail, "done")
        else:
            self._end(result, error)

    def _fail(self, fate: str) -> None:
        if not self._changes:
            self._end(None, StoreError(f"the store was not read ({fate})"))
        elif fate == "refused":
            self._end(None, WriteFailedError("the store cannot be reached"))
        else:
            self._end(None, OutcomeUnknownError(f"the store did not report the outcome ({fate})"))

    def _end(self, result: Any, error: StoreError | None) -> None:
        if not self._client.loop.dead:
            self._client.loop.deliver(self._tell, result, error)

    def _tell(self, result: Any, error: StoreError | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)
