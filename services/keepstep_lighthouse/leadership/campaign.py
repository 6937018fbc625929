"""The shell around the election: store watch, link to the leader and clock in, terms out.

One task runs ``run``; only it asks the election for actions and carries them out, so that attempts and renewals never
overlap. ``on_over`` is called as soon as a term ends; the key is given up when the owner of the term calls ``release``,
after it has closed its sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from keepstep_lighthouse.leadership.election import TRY_AGAIN_SECONDS, Election, Leader, Renew, StepDown, Take
from keepstep_lighthouse.leadership.leader_link import LeaderLink
from keepstep_lighthouse.leadership.term import EPOCH_KEY, STORE_TIMEOUT, Term, parse_epoch
from keepstep_lighthouse.store.contract import Compare, Store, StoreError, Write
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger

LEADER_KEY = "leader"
LONGEST_KEY = "longest_lease"
"""Longest lease of all lighthouses that ever led, in seconds: their --lease may differ."""
WATCH_AGAIN_SECONDS = 1.0

log = get_logger("keepstep.lighthouse")


class Leadership:
    """The part of this lighthouse in the election.

    Args:
        store: shared by the lighthouses.
        node: name of this process.
        address: where other lighthouses and workers reach it.
        lease: seconds.
        link: link to the leader; gets the leader to connect to.
        on_over: called with the reason when a term ends.
        on_leader: called when another leader becomes known (or None: unknown).
    """

    def __init__(
        self,
        store: Store,
        node: str,
        address: str,
        lease: float,
        link: LeaderLink,
        on_over: Callable[[str], None],
        on_leader: Callable[[Leader | None], None],
    ) -> None:
        self.core = Election(lease)
        self.leader: Leader | None = None
        """Another lighthouse that leads; None: unknown."""
        self.trouble = "no lighthouse leads yet"
        """Why this lighthouse has no term."""
        self.doubt: str | None = None
        """Why the term may not continue, or why ``leader`` may be outdated; None: no doubt."""
        self._store = store
        self._node = node
        self._address = address
        self._link = link
        self._on_over = on_over
        self._on_leader = on_leader
        self._term: Term | None = None
        self._lease = 0
        self._led = asyncio.Event()
        self._released = asyncio.Event()
        self._released.set()
        self._wake = asyncio.Event()
        self._look_at = 0.0
        self._failures_logged = LogLimiter(max_keys=4)
        self._notifications = 0
        """Number of changes that the watch reported."""
        self._revoking: set[asyncio.Task[None]] = set()

    # ---- for the owner of the term

    async def term(self) -> Term:
        """Wait until this lighthouse leads."""
        await self._led.wait()
        if self._term is None:
            raise RuntimeError("leading without a term")
        return self._term

    def give_up(self, reason: str, *, stand_back: bool = False) -> None:
        """End the term, if any. ``stand_back``: leave the key to other lighthouses for one lease."""
        if self._term is not None:
            self._step_down(reason, stand_back=stand_back)

    def offered(self) -> None:
        """A worker offered a session here while ``leader`` leads."""
        self._link.offered()

    async def release(self) -> None:
        """Give up the key, after the owner has closed its sessions; the next term may then begin."""
        lease, self._lease = self._lease, 0
        if lease:
            await self._revoke(lease)
        self._released.set()
        self._wake.set()

    # ---- the task

    async def run(self) -> None:
        watching = asyncio.create_task(self._watch(), name="keepstep lighthouse watch")
        linking = asyncio.create_task(self._link.run(self._linked, self._link_broke), name="keepstep leader link")
        try:
            while True:
                try:
                    await self._once()
                except Exception:
                    # this task must not end: without it, a leader would never stop and a follower never lead
                    log.exception("fault in the election")
                    self.give_up("a fault in the election; the log has it")
                    await asyncio.sleep(TRY_AGAIN_SECONDS)
        finally:
            for task in (watching, linking, *self._revoking):
                task.cancel()
            await asyncio.gather(watching, linking, *self._revoking, return_exceptions=True)

    async def _once(self) -> None:
        self._wake.clear()
        now = time.monotonic()
        if now >= self._look_at and not self.core.leading:
            await self._look()
            now = time.monotonic()
        free = self._released.is_set() or self.core.leading  # otherwise the sessions of the last term are being closed
        action = self.core.action(now) if free else None
        match action:
            case Take(expected):
                await self._take(expected)
            case Renew():
                await self._renew()
            case StepDown(reason):
                self._step_down(reason)
            case None:
                act_at = self.core.deadline() if free else None
                due = [one for one in (act_at, None if self.core.leading else self._look_at) if one]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, min(due) - now) if due else None):
                        await self._wake.wait()

    async def _look(self) -> None:
        """Read the leader's key periodically, in case the watch has stopped without an error."""
        self._look_at = time.monotonic() + self.core.lease / 3
        try:
            async with asyncio.timeout(STORE_TIMEOUT):
                told = self._notifications
                value = await self._store.get(LEADER_KEY)
                if told == self._notifications:
                    self._heard(value)
                else:
                    self._look_at = 0.0  # the watch reported a change during the read, which may be newer
        except (StoreError, TimeoutError) as error:
            self.doubt = f"cannot read the leader from the store: {str(error) or 'no answer'}"
            self._warn("cannot read the leader from the store", self.doubt)
        else:
            self._store_answers()

    async def _take(self, expected: bytes | None) -> None:
        sent, lease = time.monotonic(), 0
        try:
            async with asyncio.timeout(min(STORE_TIMEOUT, self.core.lease / 2)):
                lease = await self._store.grant_lease(self.core.lease)
                stored = await self._store.get(EPOCH_KEY)
                longest = await self._store.get(LONGEST_KEY)
                fence = max(self.core.lease, _seconds(longest))
                epoch = parse_epoch(stored) + 1
                record = Leader(self._node, self._address, lease).encode()
                compare = (Compare(LEADER_KEY, expected), Compare(EPOCH_KEY, stored))
                writes = [Write(LEADER_KEY, record, lease), Write(EPOCH_KEY, b"%d" % epoch)]
                if fence > _seconds(longest):
                    writes.append(Write(LONGEST_KEY, b"%r" % fence))
                taken = await self._store.transact(compare, writes)
        except asyncio.CancelledError:
            if lease:  # the attempt may succeed after this process has ended
                await self._revoke(lease)
            raise
        except (StoreError, TimeoutError) as error:
            self.trouble = f"cannot begin a term: {str(error) or 'the store does not answer'}"
            self._warn("cannot begin a term", self.trouble)
            self._not_taken(lease, outrun=False)
            return
        if not taken:
            self._not_taken(lease, outrun=True)
            return
        self.core.took(record, sent)
        self.leader, self._lease = None, lease
        self._link.follow(None, b"")
        # A leader that was deposed while alive may confirm its quorum until its lease is over by its own clock. A
        # missing key proves nothing: a later leader may have taken it and given it up.
        fenced_until = time.monotonic() + fence
        self._term = Term(self._store, epoch, Compare(LEADER_KEY, record), lambda: self.core.until, fenced_until)
        self._released.clear()
        self._led.set()
        if expected is not None:
            with contextlib.suppress(StoreError):
                self._revoke_soon(Leader.decode(expected).lease)

    def _not_taken(self, lease: int, *, outrun: bool) -> None:
        self.core.not_taken(time.monotonic(), outrun=outrun)
        self._look_at = 0.0
        if lease:  # if the attempt succeeded after all, this removes the key
            self._revoke_soon(lease)

    async def _renew(self) -> None:
        sent = time.monotonic()
        try:
            async with asyncio.timeout_at(sent + min(self.core.lease / 3, max(0.05, self.core.until - sent))):
                await self._store.keep_alive(self._lease)
                self._heard(await self._store.get(LEADER_KEY))
            self.core.renewed(sent)
            self._store_answers()
        except (StoreError, TimeoutError) as error:
            now = time.monotonic()
            reason = str(error) or "it does not answer"
            self.doubt = f"cannot renew the lease, which ends in {self.core.until - now:.1f} s: {reason}"
            self._warn("lease not renewed", self.doubt)
            self.core.not_renewed(now)
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(self.core.lease / 20):
                    self._heard(await self._store.get(LEADER_KEY))

    def _warn(self, event: str, reason: str) -> None:
        """Log what the store did not do. The election tries again several times a second."""
        if (suppressed := self._failures_logged.take(time.monotonic(), event)) is not None:
            log.warning(event, reason=reason, **({"more_of_these": suppressed} if suppressed else {}))

    def _store_answers(self) -> None:
        self.doubt = None
        self._failures_logged.reset()

    def _step_down(self, reason: str, *, stand_back: bool = False) -> None:
        self._term = None
        self._led.clear()
        self.core.stepped_down(time.monotonic(), stand_back=stand_back)
        self._look_at = 0.0
        self.trouble = reason
        self._on_over(reason)
        self._wake.set()

    # ---- what is heard

    async def _watch(self) -> None:
        failures_logged = LogLimiter(max_keys=4)
        while True:
            try:
                async with self._store.watch(LEADER_KEY) as watch:
                    async for change in watch:
                        if change.key == LEADER_KEY:
                            self._notifications += 1
                            self._heard(change.value)
                            self._wake.set()
            except StoreError as error:
                if failures_logged.allows(time.monotonic(), str(error)):
                    log.warning("watch of the leader broke; retrying", reason=str(error))
            await asyncio.sleep(WATCH_AGAIN_SECONDS)

    def _heard(self, value: bytes | None) -> None:
        self.core.heard(value)
        if self.core.leading:
            return
        try:
            leader = None if value is None else Leader.decode(value)
        except StoreError as error:
            log.error("invalid leader in the store", reason=str(error))
            leader = None
        if leader is not None and (leader.node == self._node or leader.address == self._address):
            leader = None  # our own old key, or a previous process at our address: workers must not be sent there
        self._known(leader)
        if leader is None or value is None:
            self._link.follow(None, b"")
        else:
            self._link.follow(leader.address, value)

    def _known(self, leader: Leader | None) -> None:
        if leader != self.leader:
            self.leader = leader
            self._on_leader(leader)

    def _linked(self, value: bytes) -> None:
        self.core.linked(value)
        self._known(Leader.decode(value))

    def _link_broke(self, value: bytes) -> None:
        self.core.link_broke(value)
        self._known(None)
        self._wake.set()

    # ---- leases

    async def _revoke(self, lease: int) -> None:
        try:
            async with asyncio.timeout(STORE_TIMEOUT / 4):
                await self._store.revoke(lease)
        except (StoreError, TimeoutError) as error:
            log.info("lease not revoked; it will expire", reason=str(error) or "no answer")

    def _revoke_soon(self, lease: int) -> None:
        task = asyncio.create_task(self._revoke(lease))
        self._revoking.add(task)
        task.add_done_callback(self._revoking.discard)


def _seconds(stored: bytes | None) -> float:
    try:
        return float(stored or 0)
    except ValueError as error:
        raise StoreError(
            f"{LONGEST_KEY} in the store is {stored!r} which is not a number of seconds; delete it"
        ) from error
