"""Describe an event in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.text import bytes_text, listed

MAX_NAMED = 20
"""Members of a quorum in a sentence."""


def sentence(event: str, name: str, detail: Mapping[str, Any]) -> str:
    """Return a sentence. ``name``: stable name of a group; empty: the event is about the job."""
    reason = str(detail.get("reason", ""))
    source = name_of(str(detail.get("source", "")))
    match event:
        case "joined":
            return f"{name} joined"
        case "suspect":
            return f"{name} lost its connection and may reconnect"
        case "lost":
            return f"{name} was lost: {reason}"
        case "port_misled":
            return f"{name} returned: {reason}"
        case "left" if detail.get("cause"):
            why = "" if reason == "shutdown" else f": {reason}"
            return f"{name} {detail['cause']} at step {detail.get('step')}{why}"
        case "left":
            return f"{name} left: {reason}"
        case "job_finished" | "job_failed" | "job_stopped":
            how = event.removeprefix("job_")
            return f"the job {how} at step {detail.get('step')}" + (f": {reason}" if reason else "")
        case "closed":
            return f"all {len(_list(detail.get('groups')))} groups finished together at step {detail.get('step')}"
        case "reopened":
            return f"{detail.get('by')} reopened the job, which had finished at step {detail.get('step')}"
        case "went_back":
            return f"the job went back from step {detail.get('from')} to {detail.get('to')}: {reason}"
        case "quorum":
            members = (name_of(str(one)) for one in _list(detail.get("members")))
            return f"quorum {detail.get('quorum_id')}: {listed(members, MAX_NAMED)}"
        case "heal_began":
            return f"{name} is healing at step {detail.get('step')}" + (f" from {source}" if source else "")
        case "healed":
            size = bytes_text(_number(detail.get("bytes")))
            via = f", {detail['via']}" if detail.get("via") else ""
            return f"{name} healed: {size} in {_number(detail.get('seconds')):.2f} s{via}"
        case "heal_failed":
            return f"{name} failed to heal: {reason}"
        case "parted":
            seconds = _number(detail.get("seconds"))
            return f"{name} keeps others from committing and is kept out for {seconds:.0f} s: {reason}"
        case "let_in":
            return f"{name} may take part again, on trial: {reason}"
        case "not_parted":
            return f"no group was kept out: {reason}"
        case "drain":
            return f"{detail.get('by')} drained {name}: {reason}"
        case "replace":
            return f"{detail.get('by')} wants a spare in the place of {name}: {reason}"
        case "spare_in":
            return f"the spare {name} takes part: {reason}"
        case "evicted":
            return f"{detail.get('by')} evicted {name}: {reason}"
        case "readmitted":
            return f"{detail.get('by')} readmitted {name}"
        case "policy":
            before, changed = _map(detail.get("before")), _map(detail.get("changed"))
            changes = (f"{one} from {_value(before.get(one))} to {_value(now)}" for one, now in changed.items())
            return f"{detail.get('by')} changed the policy: {', '.join(changes)}"
        case "verify_ordered":
            return f"{detail.get('by')} ordered a comparison of all weights"
        case "replicas_verified":
            equal = f"the weights of {detail.get('groups')} groups are equal after step {detail.get('step')}"
            return equal + _missing(detail)
        case "replicas_differ":
            diverged = listed((name_of(str(one)) for one in _list(detail.get("diverged"))), MAX_NAMED)
            which = f": {diverged} from the majority" if diverged else ""
            what = f"the weights of the groups differ after step {detail.get('step')}{which}"
            return what + _missing(detail) + f"; action: {detail.get('action')}"
        case "heal_given_up":
            return f"{name} took too long to heal"
        case "exposed":
            return f"{name} is exposed: {reason}"
        case "covered":
            keepers = (name_of(one) for one in str(detail.get("keepers")).split(", "))
            return f"{name} is no longer exposed: {listed(keepers, MAX_NAMED)} has its copies"
        case "world_formed":
            former = detail.get("former_ranks")
            ranks = f"from {former} to {detail.get('ranks')}" if former else f"with {detail.get('ranks')}"
            how = f"{detail.get('how')} {ranks} ranks in {_number(detail.get('seconds')):.2f} s"
            lost = f"; {detail['went_back']} steps are lost" if detail.get("went_back") else ""
            return f"the members train on at step {detail.get('step')}: {how}{lost}"
        case "shards_lost":
            return f"shards are lost at step {detail.get('step')}: members were lost together with their keepers"
        case "runtime_differs":
            return f"{name} runs {detail.get('runtime')}; the other groups run {detail.get('others')}"
        case "quorum_id_raised":
            return f"a group had seen quorum {detail.get('quorum_id')}, which the store of the lighthouse does not hold"
        case "replica_diverged":
            return f"{name} diverged: its weights differ from the others at step {detail.get('step')}"
        case "waited_for":
            return f"the others waited {_number(detail.get('seconds')):.0f} s for {name} at step {detail.get('step')}"
        case "step_retried":
            names = (name_of(str(one)) for one in _list(detail.get("groups")))
            return f"{listed(names, MAX_NAMED)} took step {detail.get('step')} again after a loss"
        case "nonfinite":
            where = "in" if detail.get("committed") else "after"  # a step that was not committed has no number
            return f"{name} contributed a NaN or an infinity {where} step {detail.get('step')}"
        case "collectives_differ" | "values_differ" | "hung":
            return reason
        case "incident":
            return f"the verdict on {name} is {detail.get('verdict')}: {reason}"
        case "job_deleted" if detail.get("by") == "job_ttl":
            return f"the job expired, unused for {_number(detail.get('idle_seconds')):.0f} s"
        case "job_deleted":
            return f"{detail.get('by')} deleted the job"
        case "straggler":
            own, usual = _number(detail.get("seconds")), _number(detail.get("median"))
            return f"{name} is slow: {own:.3f} s per step, the median is {usual:.3f} s"
    return ": ".join(part for part in (name, event.replace("_", " "), reason) if part)


def _missing(detail: Mapping[str, Any]) -> str:
    names = listed((name_of(str(one)) for one in _list(detail.get("missing"))), MAX_NAMED)
    return f"; not compared: {names}" if names else ""


def _value(value: Any) -> str:
    """Return a value of the policy as it is written in JSON, and None as ``none``."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
