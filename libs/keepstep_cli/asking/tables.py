"""The lighthouse's answers as tables for people. Takes the JSON as it came."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Collection, Iterator
from datetime import datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keepstep_cli.asking.units import ago_text, event_text, rate_text
from keepstep_mesh.text import bytes_text, seconds_text

STYLES = {
    "running": "green",
    "standing": "yellow",
    "finishing": "yellow",
    "closed": "green",
    "failed": "red",
    "abandoned": "dim",
    "training": "green",
    "asking": "green",
    "healing": "yellow",
    "catching_up": "yellow",
    "suspect": "red",
    "absent": "red",
    "kept_out": "yellow",
    "parted": "yellow",
    "spare": "cyan",
    "gone": "dim",
}
INCARNATION = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
ROOT_CHARACTERS = 16
"""Of a root digest that are shown."""
WIDE = 1000
"""Width without a terminal: lines for programs are never wrapped."""


def short(text: str) -> str:
    """``text`` with each incarnation (``r0:uuid``) cut to what people need of it, and the lighthouse takes."""
    return INCARNATION.sub(r"\1", text)


def _clock(unix: float) -> str:
    return datetime.fromtimestamp(unix).astimezone().strftime("%H:%M:%S")


def _date(unix: float) -> str:
    return datetime.fromtimestamp(unix).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, emoji=False)


def table_of(*columns: str, fold: Collection[str]) -> Table:
    """Only the columns of ``fold`` may be broken where the terminal is narrow."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in fold)
    return table


def show_cluster(cluster: dict[str, Any]) -> None:
    for node in cluster["nodes"]:
        role = f"leads, epoch {node['epoch']}" if node["leads"] else node["trouble"] or "stands by"
        console().print(escape(f"lighthouse {node['address']}: {role}"))
    store = cluster["store"]
    console().print(escape(f"store {store['kind']}: {store['trouble'] or 'works'}"))
    for service in cluster["services"]:
        details = ", ".join(_service_detail(name, value) for name, value in service["details"].items())
        console().print(escape(f"{service['kind']} {service['name']} {service['address']}  {details}".rstrip()))


def _service_detail(name: str, value: Any) -> str:
    """Return a fact about a service: ``memory 4.0 GiB``, ``disk``, ``no durable``."""
    label = name.removesuffix("_bytes").replace("_", " ")
    if isinstance(value, bool):
        return label if value else f"no {label}"
    return f"{label} {bytes_text(value) if name.endswith('_bytes') and isinstance(value, int) else value}"


def show_status(cluster: dict[str, Any], jobs: list[dict[str, Any]]) -> None:
    show_cluster(cluster)
    show_jobs(jobs, cluster["leader"])


def show_jobs(jobs: list[dict[str, Any]], lighthouse: str | None) -> None:
    """``lighthouse``: where they are."""
    if not jobs:
        flag = f"--lighthouse {lighthouse} " if lighthouse else ""
        console().print(escape(f"no jobs yet; start one with: keepstep run {flag}--replicas 2 -- train.py"))
        return
    names = ("job", "state", "for", "step", "steps/s", "last commit", "groups", "needs", "banned")
    table = table_of(*names, fold={"banned"})
    for job in jobs:
        state = job["state"]
        banned = ", ".join(f"{short(ban['target'])} until {_clock(ban['until'])}" for ban in job["bans"])
        style = STYLES.get(state["code"], "")
        table.add_row(
            escape(job["job"]),
            f"[{style}]{state['code']}[/]" if style else state["code"],
            seconds_text(max(1.0, round(time.time() - state["since"]))),
            str(state["step"]),
            rate_text(job["steps_per_second"]),
            ago_text(job["last_commit_seconds_ago"]),
            *map(str, (job["healthy"], job["policy"]["min_replicas"])),
            escape(banned),
        )
    console().print(table)
    for job in jobs:
        newest = [incident_sentence(one)] if (one := job.get("incident")) else []
        joins = [f"a group that joins {way}"] if (way := job.get("joins")) else []
        remarks = (job["state"]["why"], *job.get("exposed", ()), *job.get("hangs", ()), *newest, *joins)
        for sentence in filter(None, remarks):
            console().print(escape(short(f"{job['job']}: {sentence}")))


def show_replicas(replicas: list[dict[str, Any]], *, wide: bool = False) -> None:
    names = ["replica", "state", "step", "a step", "heard", "restarts", "host"]
    if sharded := any(one.get("shards") for one in replicas):
        names += ["seat", "keepers", "copies"]
    more = ["last commit", "member", "ranks", "versions", "address"] if wide else []
    table = table_of(*names, *more, fold={"state", "host", "keepers", "versions"})
    for one in replicas:
        style = STYLES.get(one["state"], "")
        drain = "" if not one["draining"] else ", drained" if one["state"] == "gone" else ", draining"
        state = one["state"].replace("_", " ") + drain
        if one["heal_bytes"]:
            state += f" {one['healed_bytes'] / one['heal_bytes']:.0%}"
        table.add_row(
            escape(short(one["replica_id"])),
            f"[{style}]{state}[/]" if style else state,
            str(one["step"]),
            seconds_text(one["step_seconds"]),
            ago_text(one["heard_seconds_ago"]),
            str(one["restarts"]),
            escape(one["host"] or "-"),
            *(_shard_cells(one.get("shards")) if sharded else ()),
            *(_wide_cells(one) if wide else ()),
        )
    console().print(table)
    # Why one waits or is gone has no place beside all that: a terminal may have 80 columns.
    for one in replicas:
        for sentence in _remarks(one):
            whose = "" if sentence.startswith(one["replica_id"]) else f"{one['replica_id']}: "
            console().print(escape(short(whose + sentence)))
    if difference := runtime_difference(replicas):
        console().print(escape(f"warning: {difference}"))


def _shard_cells(shards: dict[str, Any] | None) -> tuple[str, ...]:
    """Return place, keepers, and size of the copies that a member keeps; a keeper without copies has ``!``."""
    if shards is None:
        return "-", "-", "-"
    without = {hole["keeper"] for hole in shards["exposed"]}
    keepers = ", ".join(f"{short(one)}{'!' if one in without else ''}" for one in shards["keepers"])
    return str(shards["seat"]), escape(keepers or "none!"), bytes_text(shards["copies_bytes"])


def _wide_cells(replica: dict[str, Any]) -> tuple[str, ...]:
    member = "yes" if replica["member"] else "no"
    commit = ago_text(replica.get("last_commit_seconds_ago"))  # an older lighthouse does not tell it
    ranks, runtime = str(replica["world_size"]), escape(replica["runtime"] or "-")
    return commit, member, ranks, runtime, escape(replica["address"] or "-")


def _remarks(replica: dict[str, Any]) -> Iterator[str]:
    """Yield why a group waits, is exposed or gone, and its last error if that says more."""
    why = replica["reason"]["sentence"] if replica["reason"] else ""
    if why:
        yield why
    for hole in (replica.get("shards") or {}).get("exposed", ()):
        yield f"exposed: {hole['keeper'] and 'its keeper ' + hole['keeper'] + ' has no copies: '}{hole['reason']}"
    reason = replica["last_error"].partition(": ")[2]
    if replica["last_error"] and not (reason and why.endswith(reason)):
        yield f"{replica['last_error']} ({ago_text(replica['last_error_seconds_ago'])})"


def runtime_difference(replicas: list[dict[str, Any]]) -> str | None:
    """Return a sentence if connected groups have different versions of Python or torch; None otherwise."""
    groups: dict[str, list[str]] = {}
    for one in replicas:
        if one["runtime"] and one["state"] != "gone":
            groups.setdefault(one["runtime"], []).append(one["name"])
    if len(groups) < 2:
        return None
    said = "; ".join(f"{', '.join(sorted(names))}: {runtime}" for runtime, names in sorted(groups.items()))
    return f"groups with different versions or processors may compute different results: {said}"


FACTS = {
    "heard_seconds_ago": "heard",
    "step_seconds": "step time",
    "last_commit_seconds_ago": "last commit",
    "healed_bytes": "healed",
    "heal_bytes": "to heal",
    "last_error_seconds_ago": "time of last error",
}
"""Labels of facts that differ from their names."""


def show_facts(facts: dict[str, Any]) -> None:
    table = table_of("fact", "value", fold={"value"})
    facts = {**facts, **{f"shards: {name}": value for name, value in (facts.get("shards") or {}).items()}}
    for name, value in facts.items():
        if name == "shards" and value:
            continue
        if name.endswith((": keepers", ": exposed")):
            text = ", ".join(one if isinstance(one, str) else f"{one['keeper']} ({one['reason']})" for one in value)
        elif name == "reason":
            text = value["sentence"] if value else "-"
        elif name.endswith("_ago"):
            text = ago_text(value)
        elif name.endswith("seconds"):
            text = seconds_text(value)
        elif name.endswith("bytes"):
            text = bytes_text(value)
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        elif name in ("begun", "committed") and isinstance(value, float):
            text = _date(value)
        else:
            text = str(value)
        table.add_row(FACTS.get(name, name.replace("_", " ")), escape(text or "-"))
    console().print(table)


def show_checkpoints(checkpoints: list[dict[str, Any]]) -> None:
    if not checkpoints:
        console().print("no checkpoints of this job")
        return
    table = table_of(
        "checkpoint", "step", "kind", "state", "ranks", "size", "chunks", "lacking", "where", "begun", fold={"where"}
    )
    for one in checkpoints:
        tiers = {"memory": one["in_memory"], "disk": one["on_disk"], "durable": one["durable"]}
        table.add_row(
            escape(one["id"]),
            str(one["step"]),
            one["kind"],
            one["state"],
            str(one["ranks"]),
            bytes_text(one["bytes"]),
            str(one["chunks"]),
            str(one["lacking"]),
            ", ".join(tier for tier, some in tiers.items() if some),
            _date(one["begun"]),
        )
    console().print(table)


def show_ranks(ranks: list[dict[str, Any]]) -> None:
    table = table_of("rank", "root", "producers", "size", "chunks", "lacking", "reported", fold={"producers"})
    for one in ranks:
        others = [name for name, root in one["roots"].items() if root != one["root"]]
        producers = f"{len(one['roots'])}" + (f", another state: {', '.join(others)}" if others else "")
        table.add_row(
            str(one["rank"]),
            (one["root"] or "-")[:ROOT_CHARACTERS],
            escape(producers),
            bytes_text(one["bytes"]),
            str(one["chunks"]),
            str(one["lacking"]),
            "yes" if one["reported"] else "no",
        )
    console().print(table)


def show_policy(policy: dict[str, Any]) -> None:
    table = table_of("limit", "value", fold={"value"})
    for name, value in policy.items():
        number = seconds_text(value) if name.endswith(("_timeout", "_grace", "_ttl")) else str(value)
        table.add_row(name.replace("_", " "), "the heartbeat timeout" if value is None else number)
    console().print(table)


def show_quorum(quorum: dict[str, Any], *, explain: bool) -> None:
    age = "" if quorum["age_seconds"] is None else f", {seconds_text(quorum['age_seconds'])} old"
    console().print(
        escape(
            f"job {quorum['job']}: quorum {quorum['quorum_id']} of epoch {quorum['epoch']}{age}, step {quorum['step']}"
        )
    )
    asking = set(quorum["asking"])
    table = table_of("member", "asks for the next", fold={"member"})
    for member in quorum["members"]:
        table.add_row(escape(short(member)), "yes" if member in asking else "no")
    for joiner in sorted(asking - set(quorum["members"])):
        table.add_row(escape(f"{short(joiner)} (joins)"), "yes")
    console().print(table)
    if explain:
        reason = quorum["reason"]
        if (sentence := healthy_sentence(quorum)) is not None:
            console().print(sentence)
        console().print(escape(f"{reason['code']}: {short(reason['sentence'])}"))
        for name, number in reason["numbers"].items():
            console().print(escape(f"  {name.replace('_', ' ')}: {number:g}"))
        for one in quorum.get("hangs", ()):
            console().print(escape(short(one)))
        for one in quorum.get("exposed", ()):
            console().print(escape(short(one)))
        if copies := quorum.get("copies_bytes"):
            console().print(f"copies of shards in the memory of the members: {bytes_text(copies)}")
        for one in quorum.get("spares", ()):
            console().print(escape(short(f"spare: {one}")))
        for one in quorum.get("replacing", ()):
            console().print(escape(short(f"leaves when a spare has its place: {one}")))
        for one in quorum.get("gone", ()):
            console().print(escape(short(f"gone: {one}")))


def show_stacks(answer: dict[str, Any]) -> None:
    """Print the stacks of the ranks, those with equal stacks together."""
    for sentence in answer["hangs"]:
        console().print(escape(short(sentence)))
    equal: dict[str, list[str]] = {}
    for group in answer["groups"]:
        for one in group["ranks"]:
            threads = [f"  {stack['thread']}:\n    " + "\n    ".join(stack["frames"]) for stack in one["stacks"]]
            threads += [
                f"  {fact}" for fact in (*one["children"], one["in_flight"], one["device"], one["recorder"]) if fact
            ]
            equal.setdefault("\n".join([one["line"] or "no line of the script", *threads]), []).append(
                f"{short(group['replica_id'])} rank {one['rank']}"
            )
        for rank in group["silent"]:
            equal.setdefault("no answer", []).append(f"{short(group['replica_id'])} rank {rank}")
    for text, ranks in equal.items():
        console().print(escape(f"{', '.join(ranks)}: {text}"), soft_wrap=True)


def show_incidents(answer: dict[str, Any]) -> None:
    if not answer["incidents"]:
        console().print(escape(f"no group of job {answer['job']} has ended without an order"))
        return
    table = table_of("incident", "when", "group", "host", "exit", "verdict", "evidence", fold={"host", "evidence"})
    for one in answer["incidents"]:
        table.add_row(
            event_text(one["id"]),
            _date(one["time"]),
            escape(short(one["replica_id"])),
            escape(one["host"] or "-"),
            escape(one["exit"] or "-"),
            one["verdict"],
            escape(short("; ".join(one["evidence"]))),
        )
    console().print(table)
    for host in answer["hosts"]:
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(host["verdicts"].items()))
        console().print(escape(f"{host['host']} fails repeatedly: {host['failures']} times ({verdicts})"))


def show_incident(one: dict[str, Any]) -> None:
    """Print one incident with its log and stacks."""
    which = (
        f"{event_text(one['id'])} at {_date(one['time'])}: {one['replica_id']} on {one['host'] or 'an unknown host'}"
    )
    console().print(escape(short(f"{which}: {one['verdict']}")))
    for sentence in (*one["evidence"], f"XID errors: {one['xids'] or one['gpu'] or 'not known'}"):
        console().print(escape(short(f"  {sentence}")), soft_wrap=True)
    if one["log"]:
        console().print(escape(f"last output of rank {one['rank']}:"))
        for line in one["log"]:
            console().print(escape(f"  {line}"), soft_wrap=True)
    if one["stacks"]:
        show_stacks({"hangs": (), "groups": [{"replica_id": one["replica_id"], "ranks": one["stacks"], "silent": ()}]})


def incident_sentence(one: dict[str, Any]) -> str:
    """Return the newest incident of a job as a sentence."""
    ago, evidence = ago_text(time.time() - one["time"]), "; ".join(one["evidence"])
    return f"{one['replica_id']} ended {ago}, {one['verdict']}: {evidence}"


def healthy_sentence(quorum: dict[str, Any]) -> str | None:
    """Return a sentence if no group of the job waits for longer than a step takes; None otherwise."""
    code, members = quorum["reason"]["code"], len(quorum["members"])
    trains = code in ("fast", "all_asking") or (code in ("stragglers", "majority", "grace") and quorum["asking"])
    if not members or not trains or quorum["joiners"] or quorum["healthy"] != members:
        return None
    groups = "the only group trains" if members == 1 else f"all {members} groups train"
    if code in ("fast", "all_asking"):
        return f"healthy: {groups}, and no group waits"
    return f"healthy, unless this stays: {groups}; the next quorum forms when all have finished the current step"


def show_comparison(comparison: dict[str, Any]) -> None:
    """``comparison``: the detail of a ``replicas_verified`` or ``replicas_differ`` event."""
    roots = comparison["roots"]
    table = table_of("replica", "root", "", fold={"replica"})
    rows = [(one, root) for root, groups in roots.items() for one in groups]
    for replica_id, root in sorted([*rows, *((one, "-") for one in comparison["missing"])]):
        said = "differs" if replica_id in comparison.get("diverged", ()) else ""
        table.add_row(escape(short(replica_id)), escape(root[:ROOT_CHARACTERS]), said)
    console().print(table)
    at = f"step {comparison['step']}, {comparison['groups']} groups: "
    if len(roots) == 1:
        console().print(f"{at}all have equal weights" + (", the others said nothing" if comparison["missing"] else ""))
    elif comparison["diverged"]:
        done = {"heal": "healed", "drain": "healed and drained", "report": "nothing is done"}[comparison["action"]]
        console().print(escape(short(f"{at}differ from the majority: {', '.join(comparison['diverged'])}; {done}")))
    else:
        console().print(f"{at}{len(roots)} different roots without a majority; no action")


def show_event(event: dict[str, Any]) -> None:
    at = datetime.fromtimestamp(event["time"]).astimezone().strftime("%H:%M:%S.%f")[:-3]
    detail = " ".join(f"{name}={_detail(name, value)}" for name, value in event["detail"].items())
    line = f"{event_text(event['id'])}  {at}  {event['kind']:<18} {event['replica_id']}  {detail}"
    console().print(escape(short(line).rstrip()))


def _detail(name: str, value: Any) -> str:
    """Return a value of an event, without a blank in numbers: ``4.1KiB``, ``20ms``."""
    if name in ("bytes", "bytes_per_second") and isinstance(value, int | float):
        return bytes_text(value).replace(" ", "") + ("/s" if name != "bytes" else "")
    if name == "seconds" and isinstance(value, int | float):
        return seconds_text(value).replace(" ", "")
    return value if isinstance(value, str) else json.dumps(value)
