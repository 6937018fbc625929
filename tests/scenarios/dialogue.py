"""Scenario files: prose, events, and the decisions of the lighthouse.

    # Prose explains the scenario.

    > policy min_replicas=2
    > r0, r1 open
    > r0, r1 ask for step 0
    writes quorum 1 of r0, r1
    answers r0, r1: quorum 1, step 0, lineage '', list 1

A line that starts with ``> `` is an event; ``EVENTS`` lists all forms, and ``r0, r1`` repeats an event for each group.
The lines below it are the decisions in order. While a request is open and no quorum is formed, the reason follows as
``waits: ...``. Options are in brackets. Times are virtual. All groups send heartbeats unless an event says otherwise.
Weights are compared only where a policy has ``verify_every``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from keepstep_lighthouse.quorum.events import (
    Announce,
    Decision,
    EndSession,
    FindPort,
    LogEntry,
    Persist,
    ProbePort,
    Tell,
)
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_mesh.protocol.membership import (
    OWN,
    PEER,
    UNKNOWN,
    Data,
    HeldAnswer,
    Lineage,
    MemberInfo,
    StateRoot,
    StepFailure,
    StepReport,
)
from keepstep_mesh.protocol.messages import (
    Closed,
    Denied,
    Drain,
    Evicted,
    Goodbye,
    Healing,
    MemberLost,
    Refused,
    RoundBroken,
)
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.protocol.stack_messages import Hung, RankStacks, StacksRequest, ThreadStack
from tests.support.models.core_driver import Driver

Action = Callable[["Dialogue", re.Match[str]], list[Decision]]
IDS = r"(?P<ids>[\w:]+(?:, [\w:]+)*)"
OPTIONS = (
    "finished at step",
    "stopped by a signal at step",
    "holds",
    "has seen quorum",
    "lineage",
    "failed",
    "shrink only",
    "request",
    "for",
    "layout",
    "product",
    "at",
    "root",
    "min groups",
    "grace",
    "final",
    "retry",
    "own error",
    "cannot reach",
    "names none",
    "from",
    "on its machine",
    "port",
    "a spare of",
    "has to leave",
    "publish",
    "stepped with",
    "without copies at",
    "keeps",
    "multiple",
    "waits for",
    "section of",
    "begun within",
    "begun",
    "of step",
    "work",
    "commits",
    "in flight",
    "in",
)
BRACKETS = r"(?: \[(?P<options>[^\]]*)\])?"


class Dialogue:
    """Play the events of one scenario, and describe the decisions in words."""

    def __init__(self) -> None:
        self.driver = Driver(min_replicas=1, verify_every=0)
        self.written = self.driver.record
        self.list_version = 0

    def play(self, line: str) -> list[str]:
        if line == "what is the state of the job?":
            return [self.state()]
        if line == "how did the last quorum form?":
            formed = self.driver.core.quorum_view(self.driver.now).formed
            return [f"formed: {formed.sentence if formed else 'never'}"]
        if line == "who holds up the job?":
            return [f"held up: {one}" for one in self.driver.core.hang_sentences()] or ["held up: no"]
        for pattern, action in EVENTS:
            if (match := re.fullmatch(pattern, line)) is not None:
                decisions = action(self, match)
                said = [text for decision in decisions for text in self._say(decision)]
                core = self.driver.core
                asking = core.quorum_view(self.driver.now).asking
                if asking and not any(isinstance(decision, Announce) for decision in decisions):
                    reason = core.reason(self.driver.now)
                    said.append(f"waits: {reason.sentence} ({reason.code})")
                return _counted(said)
        raise ValueError(f"unknown event {line!r}; EVENTS lists all forms")

    def _say(self, decision: Decision) -> list[str]:
        match decision:
            case Persist(record):
                before, self.written = self.written, record
                return [f"writes {what}" for what in _differences(before, record)]
            case Announce():
                who = ", ".join(self._names(session for session, _ in decision.to))
                facts = f"quorum {decision.quorum_id}, step {decision.step}, lineage {decision.lineage!r}"
                which = "the same list" if decision.version == self.list_version else f"list {decision.version}"
                joiners = f", {decision.joiners} more there" if decision.joiners else ""
                verify = ", to be compared" if decision.verify else ""
                finishing = ", finishing" if decision.finishing else ""
                lines = [f"answers {who}: {facts}, {which}{joiners}{verify}{finishing}"]
                if decision.differ:
                    lines.append(f"    with the finding: {decision.differ}")
                if not decision.uniform:
                    for member in decision.members:
                        failed = f", {member.commit_failures} failed" if member.commit_failures else ""
                        shrink = ", shrink only" if member.shrink_only else ""
                        lines.append(
                            f"    {member.replica_id}: step {member.step}, lineage {member.lineage!r}{failed}{shrink}"
                        )
                self.list_version = decision.version
                return lines
            case Tell(to, message):
                return [self._say_message(", ".join(self._names(to)), message)]
            case EndSession(session):
                return [f"ends the session of {self._names([session])[0]}"]
            case FindPort(_, replica_id, host, port):
                return [f"looks for {replica_id} at {host}:{port}"]
            case ProbePort(_, replica_id, host, port, seconds):
                return [f"probes the port of {replica_id} at {host}:{port} for {seconds:g} s"]
            case LogEntry("port_misled", replica_id, detail):
                return [f"finds that the port of {replica_id} misled it: {detail['reason']}"]
            case LogEntry("replicas_verified", _, detail):
                return [f"finds {detail['groups']} groups equal at step {detail['step']}{_missing(detail)}"]
            case LogEntry("replicas_differ", _, detail):
                said = "; ".join(f"{root} of {', '.join(groups)}" for root, groups in detail["roots"].items())  # type: ignore[attr-defined]
                return [f"finds different roots at step {detail['step']}: {said}{_missing(detail)}"]
            case LogEntry("replica_diverged", replica_id, detail):
                return [f"finds that {replica_id} diverged: {detail['action']}"]
            case LogEntry("values_differ", _, detail):
                return [f"finds that {detail['reason']} (action: {detail['action']})"]
            case LogEntry("went_back", _, detail):
                return [
                    f"finds that the job went back from step {detail['from']} to {detail['to']}: {detail['reason']}"
                ]
            case LogEntry("parted", name, detail):
                return [f"parts {name} for {detail['seconds']:g} s: {detail['reason']}"]
            case LogEntry("not_parted", _, detail):
                return [f"parts no group: {detail['reason']}"]
            case LogEntry("hung", replica_id, detail) if not detail["ended"]:
                return [f"spares {replica_id}: {detail['reason']}; {detail['spared']}"]
            case LogEntry("spare_in", replica_id, detail):
                return [f"lets the spare {replica_id} in: {detail['reason']}"]
            case LogEntry("let_in", name, detail):
                return [f"lets {name} in: {detail['reason']}"]
            case LogEntry():
                return []
        raise TypeError(f"unknown decision {decision}")

    def _say_message(self, who: str, message: object) -> str:
        match message:
            case MemberLost(quorum_id, replica_id, reason):
                return f"tells {who}: {replica_id} of quorum {quorum_id} is lost, {reason}"
            case RoundBroken(quorum_id, reason):
                return f"tells {who}: the round of quorum {quorum_id} is broken, {reason}"
            case Denied(_, code, reason, peer):
                return f"denies {who} ({code}): {reason}" + (f" [compare with {peer}]" if peer else "")
            case Refused(code, reason):
                return f"refuses {who} ({code}): {reason}"
            case Drain(reason):
                return f"tells {who} to drain: {reason}"
            case Evicted(reason, ban_seconds):
                return f"tells {who} that it is evicted, banned for {ban_seconds:g} s: {reason}"
            case Closed(_, final):
                return f"tells {who}: {final.groups} groups finished at step {final.step}, lineage {final.lineage!r}"
            case StacksRequest():
                return f"asks {who} for stacks"
            case Hung(reason, ban_seconds):
                banned = f", banned for {ban_seconds:g} s" if ban_seconds else ""
                return f"tells {who} to end{banned}: {reason}"
            case Goodbye():
                return f"says goodbye to {who}"
        raise TypeError(f"unknown message {message}")

    def _names(self, sessions: object) -> list[str]:
        """replica_ids of ``sessions``, marked ``(old)`` where the group has a newer session."""
        names = []
        replica_of = self.driver.replica_of
        for session in sessions:  # type: ignore[attr-defined]
            replica_id = replica_of[session]
            newest = max(number for number, one in replica_of.items() if one == replica_id)
            names.append(replica_id if newest == session else f"{replica_id}(old)")
        return names

    # ---- events

    def policy(self, match: re.Match[str]) -> list[Decision]:
        changes = dict(pair.split("=") for pair in match["changes"].split())
        policy = replace(self.driver.record.policy, **{k: _number(v) for k, v in changes.items()})
        if match["who"]:
            return self.driver.sets_policy(policy)
        self.driver = Driver(policy)
        self.written = self.driver.record
        return []

    def opens(self, match: re.Match[str]) -> list[Decision]:
        options = _options(match)
        held = None
        if "holds" in options:
            quorum_id, step = re.fullmatch(r"quorum (\d+) step (\d+)", options["holds"]).groups()  # type: ignore[union-attr]
            held = HeldAnswer(1, int(quorum_id), int(step))
        seen = int(options.get("has seen quorum", "0"))
        spares = {"groups": int(options["a spare of"]), "standby": True} if "a spare of" in options else {}
        facts = {"seen": seen, "host": options.get("from", ""), "local": "on its machine" in options, **spares}
        return self._each(match, lambda one: self.driver.opens(one, held=held, **facts))

    def asks(self, match: re.Match[str]) -> list[Decision]:
        options = _options(match)
        lineage = options.get("lineage", "")
        layout = options.get("layout", "" if {"port", "at", "product"} & options.keys() else None)
        port = f":{options['port']}" if "port" in options else ""
        return self._each(
            match,
            lambda replica_id: self.driver.asks(
                replica_id,
                int(match["step"]),
                _lineage(lineage),
                failures=int(options.get("failed", "1" if "retry" in options else "0")),
                shrink="shrink only" in options or "retry" in options,
                request=int(options["request"]) if "request" in options else None,
                timeout=float(options.get("for", "600 s").removesuffix(" s")),
                info=MemberInfo(
                    f"http://{options.get('at', name_of(replica_id))}{port}",
                    layout=layout,
                    product=options.get("product", ""),
                )
                if layout is not None
                else None,
                root=_root(options["root"]) if "root" in options else None,
                min_groups=int(options.get("min groups", "0")),
                grace=float(options.get("grace", "0 s").removesuffix(" s")),
                final="final" in options,
                failure=self._failure(options),
                retry="retry" in options,
                replace="SIGTERM" if "has to leave" in options else "",
                publish=options.get("publish", ""),
                multiple=int(options.get("multiple", "1")),
                last_step=self._report(int(match["step"]), options),
            ),
        )

    def _report(self, step: int, options: dict[str, str]) -> StepReport | None:
        values = options.get("stepped with", "")
        return StepReport(self.driver.record.quorum_id, step - 1, True, 1, values=values) if values else None

    def _failure(self, options: dict[str, str]) -> StepFailure | None:
        quorum_id = self.driver.record.quorum_id
        if "own error" in options:
            return StepFailure(quorum_id, OWN, (), options["own error"])
        if "cannot reach" in options:
            return StepFailure(quorum_id, PEER, tuple(options["cannot reach"].split(" and ")), "timeout")
        return StepFailure(quorum_id, UNKNOWN, (), "timeout") if "names none" in options else None

    def healed(self, match: re.Match[str]) -> list[Decision]:
        return self._each(match, lambda one: self.driver.reports(one, Healing(1, 1, 1.0, ended=True)))

    def tells_shards(self, match: re.Match[str]) -> list[Decision]:
        keepers = tuple(match["keepers"].split(", ")) if match["keepers"] else ()
        holes, keeps = (
            tuple(one for one in _options(match).get(option, "").split(" and ") if one)
            for option in ("without copies at", "keeps")
        )
        return self.driver.tells_shards(match["ids"], int(match["world"]), keepers, without=holes, keeps=keeps)

    def stands(self, match: re.Match[str]) -> list[Decision]:
        options, line = _options(match), match["line"]
        found = RankStacks(
            number=1,
            rank=int(match["rank"]),
            line=line,
            waits=options.get("waits for", ""),
            section="evaluate" if "section of" in options else "",
            section_ms=int(float(options.get("in", "0 s").removesuffix(" s")) * 1000),
            section_limit_ms=int(float(options.get("section of", "0 s").removesuffix(" s")) * 1000),
            step=int(options.get("of step", "0")),
            collectives=int(options.get("begun", "0")),
            group_collectives=int(options.get("begun within", "0")),
            in_flight=options.get("in flight", ""),
            work=int(options.get("work", "0")),
            commits=int(options.get("commits", "0")),
            stacks=(ThreadStack("MainThread", (f"{line.partition(' ')[0]} step", "library.py:1 read")),),
        )
        return self._each(match, lambda replica_id: self.driver.stacks(replica_id, found))

    def leaves(self, match: re.Match[str]) -> list[Decision]:
        told: tuple[str, str, int | None] = "told to", "", None
        for option, value in _options(match).items():
            cause, reason = ("finished", "shutdown") if option == "finished at step" else ("stopped", "SIGTERM")
            told = reason, cause, int(value)
        reason, cause, step = told
        return self._each(match, lambda replica_id: self.driver.leaves(replica_id, reason, cause=cause, step=step))

    def state(self) -> str:
        status = self.driver.core.status(self.driver.now, self.driver.unix)
        ago = round(self.driver.unix - status.since, 3)
        said = f"{status.code} at step {status.step} for {ago:g} s" + (f": {status.why}" if status.why else "")
        return f"state: {said}"

    def heals(self, match: re.Match[str]) -> list[Decision]:
        mib = 1024 * 1024
        return self.driver.heals(match["ids"], int(match["done"]) * mib, int(match["total"]) * mib, 10.0 * mib)

    def fails_to_heal(self, match: re.Match[str]) -> list[Decision]:
        return self.driver.reports(match["ids"], Healing(0, 0, 0.0, ended=True, error=match["error"]))

    def passes(self, match: re.Match[str]) -> list[Decision]:
        silent = match["silent"].split(", ") if match["silent"] else ()
        return self.driver.passes(float(match["seconds"]), silent=silent)

    def restarts(self, _: re.Match[str]) -> list[Decision]:
        self.driver.restart()
        self.list_version = 0
        return []

    def restores(self, match: re.Match[str]) -> list[Decision]:
        members = tuple(match["ids"].split(", "))
        self.driver.record = JobRecord(int(match["quorum"]), members, policy=self.driver.record.policy)
        self.written = self.driver.record
        return self.restarts(match)

    def loses_its_store(self, match: re.Match[str]) -> list[Decision]:
        self.driver.record = JobRecord(policy=self.driver.record.policy)
        self.written = self.driver.record
        return self.restarts(match)

    def _each(self, match: re.Match[str], act: Callable[[str], list[Decision]]) -> list[Decision]:
        return [decision for replica_id in match["ids"].split(", ") for decision in act(replica_id)]


def _simple(name: str) -> Action:
    """An event whose ``Driver`` method has no parameter but the replica_id."""
    return lambda dialogue, match: dialogue._each(match, getattr(dialogue.driver, name))


EVENTS: tuple[tuple[str, Action], ...] = (
    (r"(?P<who>ann sets )?policy (?P<changes>.+)", Dialogue.policy),
    (IDS + r" opens?" + BRACKETS, Dialogue.opens),
    (IDS + r" asks? for step (?P<step>\d+)" + BRACKETS, Dialogue.asks),
    (IDS + r" gives? up", _simple("cancels")),
    (IDS + r" loses? the connection", _simple("closes")),
    (IDS + r" answers? at (?:its|their) ports?", _simple("port_answers")),
    (r"the port of " + IDS + r" refuses", _simple("port_refuses")),
    (r"(?P<ids>[\w:]+) is healing, (?P<done>\d+) of (?P<total>\d+) MiB", Dialogue.heals),
    (r"(?P<ids>[\w:]+) fails to heal: (?P<error>.+)", Dialogue.fails_to_heal),
    (IDS + r" ha(?:s|ve) healed", Dialogue.healed),
    (
        r"(?P<ids>[\w:]+) is in world (?P<world>\d+)(?:, kept by (?P<keepers>[\w:, ]+))?" + BRACKETS,
        Dialogue.tells_shards,
    ),
    (IDS + r" rank (?P<rank>\d+) stands? in (?P<line>[^\[]+?)" + BRACKETS, Dialogue.stands),
    (IDS + r" leaves?" + BRACKETS, Dialogue.leaves),
    (IDS + r" moves? to another lighthouse", _simple("moves")),
    (IDS + r" fails?", _simple("fails")),
    (r"ann evicts (?P<ids>[\w:]+)", _simple("evicts")),
    (r"ann bans (?P<ids>[\w:]+) for (?P<s>\d+) s", lambda d, m: d.driver.evicts(m["ids"], float(m["s"]))),
    (r"ann drains (?P<ids>[\w:]+)", _simple("drains")),
    (r"ann replaces (?P<ids>[\w:]+)", _simple("replaces")),
    (r"ann wants the groups compared", lambda d, _: d.driver.wants_comparison()),
    (r"ann readmits (?P<ids>[\w:]+)", _simple("readmits")),
    (r"ann reopens the job", lambda d, _: d.driver.reopens()),
    (r"(?P<seconds>[\d.]+) s pass(?:, (?P<silent>[\w:, ]+) silent)?", Dialogue.passes),
    (r"the lighthouse is killed and restarts", Dialogue.restarts),
    (r"the lighthouse restarts with quorum (?P<quorum>\d+) of " + IDS + r" in its store", Dialogue.restores),
    (r"the lighthouse is killed and restarts without its store", Dialogue.loses_its_store),
)


def _counted(said: list[str]) -> list[str]:
    """Write equal lines in a row as one, with their number."""
    runs = [(line, len(list(equal))) for line, equal in itertools.groupby(said)]
    return [f"{line} ({times} times)" if times > 1 else line for line, times in runs]


def _options(match: re.Match[str]) -> dict[str, str]:
    """``[lineage 3, shrink only]`` as ``{"lineage": "3", "shrink only": ""}``."""
    options = {}
    for option in (match["options"] or "").split(", "):
        for name in OPTIONS:
            if option == name or option.startswith(f"{name} "):
                options[name] = option[len(name) + 1 :]
                break
        else:
            if option:
                raise ValueError(f"unknown option {option!r}; known options: {', '.join(OPTIONS)}")
    return options


def _lineage(text: str) -> Lineage:
    return int(text) if text.isdigit() else text


def _root(text: str) -> StateRoot:
    """``aa at step 2 of 1`` is digest aa of the state at step 2, lineage 1."""
    digest, step, lineage = re.fullmatch(r"(\w+) at step (\d+) of (\S*)", text).groups()  # type: ignore[union-attr]
    return StateRoot(int(step), _lineage(lineage), digest)


def _missing(detail: dict[str, Data]) -> str:
    return f", {', '.join(detail['missing'])} said none" if detail["missing"] else ""  # type: ignore[arg-type]


def _number(text: str) -> float | str | bool | None:
    if text in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text]
    if text.isalpha():
        return text
    return float(text) if "." in text else int(text)


def _differences(before: JobRecord, after: JobRecord) -> list[str]:
    said = []
    if before.quorum_id != after.quorum_id:
        said.append(f"quorum {after.quorum_id} of {', '.join(after.members) or 'unknown members'}")
    if before.evicted != after.evicted:
        said.append(f"evicted: {', '.join(after.evicted) or 'none'}")
    if before.bans != after.bans:
        said.append(f"banned: {', '.join(ban.target for ban in after.bans) or 'none'}")
    if before.finished_step != after.finished_step:
        said.append(f"that a group finished at step {after.finished_step}" if after.finished_step else "no finish")
    if before.ended != after.ended:
        said.append(f"the end: {after.ended.code} at step {after.ended.step}" if after.ended else "no end")
    if before.closed != after.closed:
        said.append(f"that the job is closed at step {after.closed.step}" if after.closed else "that the job is open")
    if before.replacing != after.replacing:
        said.append(f"to replace: {', '.join(one.replica_id for one in after.replacing) or 'none'}")
    if before.diverged != after.diverged:
        ids = ", ".join(f"{one.replica_id} ({one.what})" for one in after.diverged)
        said.append(f"groups that had to heal: {ids or 'none'}")
    if before.policy != after.policy:
        said.append("policy")
    if before.longest_step != after.longest_step:
        said.append(f"steps of up to {after.longest_step:g} s")
    return said


def replay(text: str) -> str:
    """The scenario ``text`` with the present decisions of the core."""
    dialogue = Dialogue()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("> "):
            lines.append(line)
            lines += dialogue.play(line[2:])
        elif not line or line.startswith("#"):
            lines.append(line)
    return "\n".join(lines) + "\n"


def scenario_files() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.txt"))
