"""The meeting of all ranks of a quorum: they tell each other what they have, and build their process groups there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import astuple, fields
from datetime import timedelta
from typing import Any

import msgpack

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.one_copy.core.holding import Copy, Holding, Shard, State
from keepstep.one_copy.core.world import Seat, World
from keepstep.rendezvous.key_value_server import KeyValueServer, RendezvousError, Table
from keepstep.rendezvous.store_client import RendezvousStore
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.text import listed

log = get_logger("keepstep.one_copy")

HOLDINGS, CHECKPOINT, GROUPS = 0, 1, 2
"""Numbers of the tables of a quorum: for the holdings and the choice of a checkpoint, and from where those of process
groups begin."""
MAX_NAMED = 4

Member = tuple[str, int]
"""replica_id of a member, and a rank in it."""


class Meeting:
    """One quorum's place of rendezvous, at the group server of one of its members.

    Args:
        plan: of the quorum.
        job: its name.
        token: of the job.
        key_values: the server of this process; None: it has none.
        own_address: of the group server of this member.
        timeout: of each wait.
    """

    def __init__(
        self,
        plan: QuorumPlan,
        *,
        job: str,
        token: ClientToken,
        key_values: KeyValueServer | None,
        own_address: str,
        timeout: timedelta,
    ) -> None:
        self._plan = plan
        self._job = job
        self._token = token
        self._server = key_values if plan.store_address == own_address else None
        self._timeout = timeout
        self._lock = threading.Lock()
        self._stores: list[RendezvousStore] = []
        self._told: RendezvousStore | None = None
        self._ended = ""

    def store(self, number: int) -> RendezvousStore:
        """Return the store with a number, which all ranks share. An ended meeting raises in its waits."""
        table = Table(self._job, self._plan.epoch, self._plan.quorum_id, number)
        store = RendezvousStore(
            self._plan.store_address,
            table,
            timeout=self._timeout,
            token=self._token,
            server=self._server,
            version=min(member.info.rendezvous for member in self._plan.members),
        )
        with self._lock:
            self._stores.append(store)
            if self._ended:
                store.abort(self._ended)
        return store

    def exchange(self, mine: Holding, ranks_per_seat: int) -> list[Holding]:
        """Return the holdings of all ranks: members in the order of the quorum, and their ranks in order.

        Raises:
            Exception: a member is lost, or does not come in time.
        """
        members = [(one, rank) for one in self._plan.replica_ids for rank in range(ranks_per_seat)]
        told = self.gather("", packed(mine), (mine.replica_id, mine.group_rank), members)
        return [unpacked(data) for data in told]

    def gather(
        self, name: str, mine: bytes, own: Member, members: Sequence[Member], build: timedelta = timedelta()
    ) -> list[bytes]:
        """Return what all ranks tell, in the order of ``members``.

        Args:
            name: of what they tell, different in each call.
            mine: what this rank tells; at most 1 MiB.
            own: this rank.
            members: ranks to wait for. A rank that is not among them only tells.
            build: longest wait, if it is longer than ``timeout``, because the ranks call ``build`` before.

        Raises:
            RendezvousError: a member is lost, or does not come in time.
        """
        if self._told is None:
            self._told = self.store(HOLDINGS)
        told, keys = self._told, [_key(name, one) for one in members]
        told.set(_key(name, own), mine)
        limit, what = self._timeout, ""
        try:
            try:
                return told.multi_get(keys)
            except TimeoutError:
                if build <= limit:
                    raise
            names = self._absent(told, keys, members)
            log.warning("build() takes longer than timeout; waiting for it", members=names, limit=str(build))
            what = ", which is in build(); raise build_timeout, or make build() faster"
            left, limit = build - limit, build
            told.wait(keys, left)
            return told.multi_get(keys)
        except TimeoutError as error:
            names = self._absent(told, keys, members)
            raise RendezvousError(f"no answer within {limit} from {names}{what}") from error

    @staticmethod
    def _absent(told: RendezvousStore, keys: Sequence[str], members: Sequence[Member]) -> str:
        absent = [one for key, one in zip(keys, members, strict=True) if not told.check([key])]
        return listed([f"{name_of(name)} (rank {rank})" for name, rank in absent], MAX_NAMED)

    def end(self, reason: str) -> None:
        """End all waits. From any thread."""
        with self._lock:
            self._ended = reason
            for store in self._stores:
                store.abort(reason)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for store in self._stores:
                store.close()


def _key(name: str, member: Member) -> str:
    return f"{name}{member[0]}/{member[1]}"


def packed(holding: Holding) -> bytes:
    """Return a holding as bytes."""
    data: bytes = msgpack.packb(astuple(holding))
    return data


def unpacked(data: bytes) -> Holding:
    """Return the holding of another rank. KeepstepError: it runs another keepstep."""
    try:
        values = dict(zip((one.name for one in fields(Holding)), msgpack.unpackb(data), strict=True))
        values["shards"] = tuple(
            Shard(_world(world), rank, State(*state), voted, trial)
            for world, rank, state, voted, trial in values["shards"]
        )
        values["copies"] = tuple(
            Copy(world, rank, tuple(State(*one) for one in states), _state(committed))
            for world, rank, states, committed in values["copies"]
        )
        return Holding(**values)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise KeepstepError(
            f"another rank tells what it has in a form that this keepstep does not know ({error}): run the same "
            f"version in all members"
        ) from error


def _state(value: Any) -> State | None:
    return None if value is None else State(*value)


def _world(value: Any) -> World:
    number, formed, seats, ranks_per_seat = value
    return World(number, formed, tuple(Seat(*one) for one in seats), ranks_per_seat)
