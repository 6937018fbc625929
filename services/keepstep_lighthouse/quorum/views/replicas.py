"""Read-only views of the quorum and of each group, for the REST API."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice

from keepstep_lighthouse.quorum.events import Announce, Reason
from keepstep_lighthouse.quorum.groups.group import ASKING, HEALING, Exclusion, Group, Heal
from keepstep_lighthouse.quorum.groups.groups import Groups
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_lighthouse.quorum.views import reasons
from keepstep_mesh.protocol.lineage import is_following
from keepstep_mesh.protocol.membership import Lineage
from keepstep_mesh.protocol.messages import ShardReport
from keepstep_mesh.protocol.names import name_of

MAX_GONE = 100
MAX_GONE_NAMED = 5
GONE_SECONDS = 600.0
"""Limits on the groups that left and are still shown."""


class ReplicaState(Enum):
    ASKING = "asking"
    """Waits for the next quorum."""
    TRAINING = "training"
    """Works under the current quorum."""
    HEALING = "healing"
    CATCHING_UP = "catching_up"
    """Takes part in the steps of the current quorum without weights, while the state of the others arrives."""
    IDLE = "idle"
    """Connected, not in the quorum, has not asked."""
    KEPT_OUT = "kept_out"
    """Excluded: an older incarnation of its name is healthy, or its layout or settings differ."""
    PARTED = "parted"
    """On probation: it keeps failing, or it and others cannot reach each other."""
    SPARE = "spare"
    """Stands by: it takes part as soon as a group is missing."""
    SUSPECT = "suspect"
    """Its connection ended; it may reconnect within reconnect_grace."""
    ABSENT = "absent"
    """Member of the quorum before a takeover; has not reconnected yet."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class ReplicaView:
    replica_id: str
    name: str
    state: ReplicaState
    member: bool
    """Of the current quorum."""
    draining: bool = False
    step: int = 0
    lineage: Lineage = ""
    world_size: int = 0
    """0: unknown."""
    address: str = ""
    heard_seconds_ago: float | None = None
    """None: this lighthouse never received a frame of it."""
    step_seconds: float | None = None
    """From its last answer to its next request; None: not measured yet."""
    last_commit_seconds_ago: float | None = None
    """None: it has committed no step under this lighthouse."""
    healed_bytes: int = 0
    heal_bytes: int = 0
    """0: unknown, or not healing."""
    reason: Reason | None = None
    """Why it waits, catches up, left, or holds up the job, if the reason concerns this group only."""
    restarts: int = 0
    """Earlier incarnations of its name, since this lighthouse leads; so for all facts below."""
    host: str = ""
    """Name of its machine; empty: unknown."""
    runtime: str = ""
    """Versions of its Python and torch; empty: unknown."""
    last_error: str = ""
    """Last loss, failed heal, or refusal of this name; a heal that succeeds clears it. Empty: none."""
    last_error_seconds_ago: float | None = None
    shards: ShardReport | None = None
    """Of a job whose model exists once: place, keepers, exposure, and the last recovery."""


@dataclass(frozen=True, slots=True)
class HealView:
    """A heal in progress."""

    replica_id: str
    step: int
    """Step of the state that it receives."""
    source: str
    """replica_id of the source; empty: unknown."""
    via: str
    """``relay``, ``direct`` ...; empty: unknown."""
    bytes_done: int
    bytes_total: int
    """0: unknown."""
    bytes_per_second: float
    """Over the last seconds."""
    seconds_left: float | None
    """At this rate; None: unknown."""
    began_seconds_ago: float


@dataclass(frozen=True, slots=True)
class QuorumView:
    quorum_id: int
    created_ms: int
    members: tuple[str, ...]
    """Those that have not left and are not lost."""
    step: int
    lineage: Lineage
    """Reference state of the last round that this lighthouse announced; 0 and "" before."""
    asking: tuple[str, ...]
    """Sorted."""
    healthy: int
    joiners: int
    reason: Reason
    """Why the next quorum is not formed yet; if no group asks, how the last one was formed."""
    formed: Reason | None
    """How the last quorum was formed; None: not by this lighthouse."""
    gone: tuple[str, ...] = ()
    """Groups that left or were lost lately and have not returned, the latest first: ``replica_id: why``."""
    spares: tuple[str, ...] = ()
    """Groups that stand by, sorted."""
    replacing: tuple[str, ...] = ()
    """Groups that train until a spare has taken their place, in the order of the orders."""
    exposed: tuple[str, ...] = ()
    """Members without copies of their shards at a keeper, and the reason, sorted; each a sentence."""
    copies_bytes: int = 0
    """Size of the copies that all members keep; 0: none, or each group has the whole model."""
    hangs: tuple[str, ...] = ()
    """Ranks that hold up the job for longer than usual, and in which line; each a sentence."""
    joins: str = ""
    """How a group joins: ``catches up``, or ``heals: `` and the reason, as a member says; empty: unknown."""


def _replica_view(group: Group, groups: Groups, record: JobRecord, now: float, hang: str | None = None) -> ReplicaView:
    heal = group.heal_progress
    waits = reasons.of_group(group, groups, record, now) or reasons.catching_up(group)
    return ReplicaView(
        replica_id=group.replica_id,
        name=group.name,
        state=_state(group),
        member=group.member,
        draining=group.draining is not None,
        step=group.step,
        lineage=group.lineage,
        world_size=group.info.world_size,
        address=group.info.address,
        heard_seconds_ago=max(0.0, now - group.heard_at),
        step_seconds=group.step_seconds,
        last_commit_seconds_ago=None if group.committed_at is None else max(0.0, now - group.committed_at),
        healed_bytes=heal.bytes_done if heal else 0,
        heal_bytes=heal.bytes_total if heal else 0,
        reason=waits if hang is None else Reason("hang", {}, hang),
        shards=group.shards,
    )


def _heal_view(group: Group, heal: Heal, now: float) -> HealView:
    told = heal.progress
    return HealView(
        replica_id=group.replica_id,
        step=told.step,
        source=told.source,
        via=told.via,
        bytes_done=told.bytes_done,
        bytes_total=told.bytes_total,
        bytes_per_second=told.bytes_per_second,
        seconds_left=told.seconds_left,
        began_seconds_ago=max(0.0, now - heal.began),
    )


def gone_view(group: Group, groups: Groups, record: JobRecord, now: float, why: str) -> ReplicaView:
    """Return the last view of a group that leaves now."""
    last = _replica_view(group, groups, record, now)
    return replace(last, state=ReplicaState.GONE, member=False, reason=Reason("gone", {}, why))


class Gone:
    """The last views of groups that left."""

    def __init__(self) -> None:
        self._views: deque[tuple[float, ReplicaView]] = deque(maxlen=MAX_GONE)

    def add(self, view: ReplicaView, now: float) -> None:
        self._views.append((now, view))

    def lately(self, now: float) -> Iterator[ReplicaView]:
        """Yield views of groups that left within ``GONE_SECONDS``, the latest first; a group may occur twice."""
        for went, view in reversed(self._views):
            if now - went <= GONE_SECONDS:
                ages = {
                    name: age + (now - went)
                    for name in ("heard_seconds_ago", "last_commit_seconds_ago")
                    if (age := getattr(view, name)) is not None
                }
                yield replace(view, **ages)


def gone_sentences(gone: Gone, groups: Groups, now: float) -> tuple[str, ...]:
    """Return ``QuorumView.gone``."""
    why = {}
    for view in gone.lately(now):
        if view.reason is not None and view.name not in groups.by_name and view.name not in why:
            why[view.name] = f"{view.replica_id}: {view.reason.sentence}"
    return tuple(islice(why.values(), MAX_GONE_NAMED))


def quorum_view(
    groups: Groups,
    record: JobRecord,
    absent: Container[str],
    last: Announce | None,
    reason: Reason,
    formed: Reason | None,
    gone: tuple[str, ...],
    hangs: tuple[str, ...],
) -> QuorumView:
    return QuorumView(
        quorum_id=record.quorum_id,
        created_ms=record.created_ms,
        members=tuple(one for one in record.members if one in groups.by_id or one in absent),
        step=last.step if last else 0,
        lineage=last.lineage if last else "",
        asking=tuple(group.replica_id for group in groups.all_asking()),
        healthy=groups.counted,
        joiners=sum(group.excluded is None and not group.member for group in groups),
        reason=reason,
        formed=formed,
        gone=gone,
        spares=tuple(sorted(groups.spares())),
        replacing=tuple(one.replica_id for one in record.replacing),
        exposed=tuple(sorted(sentence for group in groups if group.member and (sentence := reasons.exposed(group)))),
        copies_bytes=sum(group.shards.copies_bytes for group in groups if group.shards is not None),
        hangs=hangs,
        joins=next((group.info.joins for group in groups if group.member and group.info.joins), ""),
    )


def replica_views(
    groups: Groups, record: JobRecord, absent: Iterable[str], gone: Gone, hangs: Mapping[str, str], now: float
) -> tuple[ReplicaView, ...]:
    """``hangs``: who holds up the job, a sentence by replica_id."""
    here = [_replica_view(group, groups, record, now, hangs.get(group.replica_id)) for group in groups]
    here += [ReplicaView(replica_id, name_of(replica_id), ReplicaState.ABSENT, member=True) for replica_id in absent]
    seen, went = {view.replica_id for view in here}, []
    for view in gone.lately(now):
        if view.replica_id not in seen:
            seen.add(view.replica_id)
            went.append(view)
    return (*sorted(here, key=lambda view: view.replica_id), *went)


def heal_views(groups: Groups, now: float) -> tuple[HealView, ...]:
    healing = [group for _, group in sorted(groups.heals.groups.items()) if group.state is HEALING]
    return tuple(_heal_view(group, group.heal, now) for group in healing if group.heal is not None)


_EXCLUDED = {Exclusion.PARTED: ReplicaState.PARTED, Exclusion.SPARE: ReplicaState.SPARE}


def _state(group: Group) -> ReplicaState:
    if group.session is None:
        return ReplicaState.SUSPECT
    if group.excluded is not None:
        return _EXCLUDED.get(group.excluded.reason, ReplicaState.KEPT_OUT)
    if group.member and is_following(group.lineage):
        return ReplicaState.CATCHING_UP
    if group.state is ASKING:
        return ReplicaState.ASKING
    if group.state is HEALING:
        return ReplicaState.HEALING
    return ReplicaState.TRAINING if group.member else ReplicaState.IDLE
