"""Parts of messages that describe groups and quorums; on the wire the list of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from keepstep_mesh.text import printable

MAX_DATA_BYTES = 64 * 1024
"""Limit of ``MemberInfo.data``, packed."""

Lineage = int | str
"""Identity of a group's weights: the quorum_id of its last commit; before the first one its incarnation or ``""``."""

Sentence = Annotated[str, printable]
"""Text for people. When it is decoded, control characters become escapes: other processes log it and show it."""

Data = object
"""Any msgpack value. Its size is checked, its content is not."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """Properties of a group that rarely change; sent with a request only after a change."""

    address: str = ""
    """Base URL of the group server, ``http://host:port``."""
    store_address: str = ""
    """Rendezvous of the process groups: ``http://host:port`` of a group server, or ``host:port`` of a TCPStore."""
    world_size: int = 1
    """Number of ranks of the group."""
    layout: str = ""
    """Digest of parameter names, shapes, dtypes and bucket layout; empty while unknown."""
    data: Data = None
    rendezvous: int = 1
    """Version of the rendezvous that its ranks understand."""
    product: str = ""
    """``CONDITIONS=DIGEST`` of a matrix product of rank 0. Groups with equal conditions must have equal digests. Empty:
    the group was not checked."""
    joins: Sentence = ""
    """How the group joins a job that trains: ``catches up``, or ``heals: `` and the reason; empty: unknown."""


@dataclass(frozen=True, slots=True)
class Member:
    """One group of a quorum, as announced."""

    replica_id: str
    step: int
    lineage: Lineage
    commit_failures: int
    shrink_only: bool
    info: MemberInfo
    batches_committed: int = 0
    """0 also from an older lighthouse."""


@dataclass(frozen=True, slots=True)
class StateRoot:
    """Root digest of the live state that a group held at (``step``, ``lineage``): equal for equal states."""

    step: int
    lineage: Lineage
    digest: str
    """Hexadecimal. For a group of several ranks: the digest of its ranks' digests."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a group on a step, sent with its next request."""

    quorum_id: int
    step: int
    """Of the reference state at the begin of the step."""
    committed: bool
    collectives: int
    """Number of collectives that the group began, over all its ranks. If ``committed``, all of them succeeded."""
    nonfinite: bool = False
    """The group contributed a NaN or an infinity."""
    quantized: int = 0
    """Number of these collectives that sent encoded values (``should_quantize``, codecs)."""
    values: str = ""
    """Digest of the values with which the optimizers stepped: learning rates and the like; empty: unknown."""

    @property
    def step_after(self) -> int:
        """Committed steps of the group after this one."""
        return self.step + self.committed


OWN, PEER, UNKNOWN = "own", "peer", "unknown"
"""Values of ``StepFailure.cause``."""
UNPUBLISHED, TO_PUBLISH, PUBLISHED = "no", "wanted", "done"
"""Values of ``QuorumRequest.publish``."""
MAX_PEERS = 64
"""Limit of ``StepFailure.peers``."""
MAX_FAILURE_REASON = 200
"""Limit of ``StepFailure.reason``, in characters."""


@dataclass(frozen=True, slots=True)
class StepFailure:
    """Why a step failed in a group, sent with its next request."""

    quorum_id: int
    """Of the failed step."""
    cause: str
    """``own``: an error of this group, before any connection to another group failed. ``peer``: groups that it cannot
    reach. ``unknown``: neither is known."""
    peers: tuple[str, ...] = ()
    """replica_ids of the groups that it cannot reach; with ``peer`` only."""
    reason: Sentence = ""
    """The error, for operators."""


@dataclass(frozen=True, slots=True)
class HeldAnswer:
    """The answer of the step in progress: received, and the step has neither committed nor failed yet."""

    epoch: int
    quorum_id: int
    step: int
    """``max_step`` of that answer."""


@dataclass(frozen=True, slots=True)
class FinalState:
    """State at which the groups of a job finished together."""

    step: int
    lineage: Lineage
    groups: int
    """Number of these groups."""
    closed_ms: int
    """Unix time at which the job was closed."""
    root: str = ""
    """As in ``StateRoot.digest``; empty: the groups did not compare their weights."""


# ---- the settings that all groups must have in common, as text: one line ``name value`` each

SCRIPT = "script"
"""Setting that names the class with which a script trains; unknown: ``Manager``. Other classes have other settings, so
that it is the first difference."""
MAX_SHOWN = 100
"""Characters of a name or value in a sentence."""


def settings_text(settings: Mapping[str, object]) -> str:
    """Return the text that groups compare. It does not depend on the order of ``settings``."""
    return "\n".join(f"{name} {value}" for name, value in sorted(settings.items()))


def with_settings(text: str, settings: Mapping[str, object]) -> str:
    """Return ``text`` with further settings, which replace those of the same name."""
    return settings_text({**_parsed(text), **settings})


def differ(one: str, other: str) -> bool:
    """Return whether two groups must not train together. Empty settings are unknown, and fit all."""
    return one != other and "" not in {one, other}


def difference(one: str, where: str, other: str, elsewhere: str) -> str:
    """Name the first setting in which two texts differ: ``setting init_sync: True in r0, False in r1``."""
    ours, theirs = ({SCRIPT: "Manager", **_parsed(text)} for text in (one, other))
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (name != SCRIPT, name)):
        here, there = ours.get(name, "unknown"), theirs.get(name, "unknown")
        if here != there:
            return f"setting {name[:MAX_SHOWN]}: {here[:MAX_SHOWN]} in {where}, {there[:MAX_SHOWN]} in {elsewhere}"
    return f"the settings of {where} and {elsewhere} are written differently; run one version of keepstep"


def _parsed(text: str) -> dict[str, str]:
    pairs = (line.partition(" ") for line in text.splitlines())
    return {name: value for name, _, value in pairs}
