"""What happened, as a sentence for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.text import listed

MIB = 1 << 20
MAX_NAMED = 20
"""Of the members of a quorum."""


def sentence(event: str, name: str, detail: Mapping[str, Any]) -> str:
    """``name``: the stable name of a group, empty for the job itself."""
    reason = str(detail.get("reason", ""))
    source = name_of(str(detail.get("source", "")))
    match event:
        case "joined":
            return f"{name} has come"
        case "suspect":
            return f"the connection of {name} ended; it may come back"
        case "lost":
            return f"{name} is lost: {reason}"
        case "left":
            return f"{name} has left: {reason}"
        case "failed":
            return f"{name} has failed: {reason}"
        case "quorum":
            members = (name_of(str(one)) for one in _list(detail.get("members")))
            return f"quorum {detail.get('quorum_id')}: {listed(members, MAX_NAMED)}"
        case "heal_began":
            return f"{name} heals at step {detail.get('step')}" + (f" from {source}" if source else "")
        case "healed":
            size = _number(detail.get("bytes")) / MIB
            via = f", {detail['via']}" if detail.get("via") else ""
            return f"{name} has healed: {size:.1f} MiB in {_number(detail.get('seconds')):.2f} s{via}"
        case "heal_failed":
            return f"{name} could not heal: {reason}"
        case "drain":
            return f"{name} is asked to leave by {detail.get('by')}: {reason}"
        case "evicted":
            return f"{name} is evicted by {detail.get('by')}: {reason}"
        case "readmitted":
            return f"{name} may come back, says {detail.get('by')}"
        case "replica_diverged":
            return f"the weights of {name} are not those of the others at step {detail.get('step')}"
        case "job_deleted" if detail.get("by") == "job_ttl":
            return f"the job expired: it was not used for {_number(detail.get('idle_seconds')):.0f} s"
        case "job_deleted":
            return f"the job was deleted by {detail.get('by')}"
        case "straggler":
            own, usual = _number(detail.get("seconds")), _number(detail.get("median"))
            return f"{name} is slow: {own:.3f} s a step, {usual:.3f} s is usual"
    return ": ".join(part for part in (name, event.replace("_", " "), reason) if part)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
