"""Judge the measurements of ``keepstep doctor``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep_mesh.checks.findings import Finding, Verdict, of_clock
from keepstep_mesh.text import seconds_text

WARN_ROUND_TRIP_SECONDS = 0.05
FEW_OPEN_FILES = 4096
WARN_CERTIFICATE_DAYS = 14
LARGEST_MTU = 9216
"""Of networks between machines; loopback has a larger one."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The answers of one service, or why it gave none."""

    kind: str
    """``lighthouse``, ``relay`` or ``metrics``."""
    address: str
    problem: str = ""
    """Why it did not answer; empty: it did."""
    answers_as: str = ""
    """Kind that it reports."""
    round_trip: float = 0.0
    clock_offset: float | None = None
    """Its clock minus ours, seconds; None: an older release, which does not tell its time."""
    large_problem: str = ""
    """Why a request of several packets of full size got no answer; empty: it got one."""
    mtu: int | None = None
    """Of the route to it, in bytes; None: unknown."""
    not_ready: str = ""
    """Why the service cannot do its work, as ``/readyz`` says; empty: it can."""
    certificate_days: float | None = None
    """Until its certificate ends; None: unknown, or no TLS."""


def of_service(probe: Probe) -> list[Finding]:
    name = f"{probe.kind} {probe.address}"
    if probe.problem:
        advice = "start it, open its port in the firewall, or correct its --advertise address"
        return [Finding(name, Verdict.FAIL, probe.problem, advice)]
    if probe.answers_as != probe.kind:
        found = f"another service answers: {probe.answers_as or 'none of keepstep'}"
        return [Finding(name, Verdict.FAIL, found, "correct the address")]
    slow = probe.round_trip > WARN_ROUND_TRIP_SECONDS
    trip = f"answers in {seconds_text(probe.round_trip)}"
    advice = "each step waits for the lighthouse: place it near the groups" if slow else ""
    findings = [Finding(name, Verdict.WARN if slow else Verdict.OK, trip, advice)]
    if probe.large_problem:
        advice = "packets of full size are lost on the way: set one MTU on all interfaces, and allow ICMP"
        findings.append(Finding(f"large packets to {probe.address}", Verdict.FAIL, probe.large_problem, advice))
    if probe.not_ready:
        advice = "fix the reason; the log of the service has more"
        findings.append(Finding(f"readiness of {probe.address}", Verdict.FAIL, probe.not_ready, advice))
    if probe.certificate_days is not None:
        soon = probe.certificate_days < WARN_CERTIFICATE_DAYS
        findings.append(
            Finding(
                f"certificate of {probe.address}",
                Verdict.WARN if soon else Verdict.OK,
                f"ends in {probe.certificate_days:.1f} days",
                "write a new certificate into its file; the service needs no restart" if soon else "",
            )
        )
    if probe.clock_offset is not None:
        findings.append(of_clock(probe.address, probe.clock_offset, probe.round_trip))
    return findings


def of_mtus(mtus: Mapping[str, int]) -> list[Finding]:
    """``mtus``: MTU of the route to each address. Routes within this machine are left out."""
    values = sorted({mtu for mtu in mtus.values() if mtu <= LARGEST_MTU})
    if not values:
        return []
    found = ", ".join(f"{value} bytes" for value in values)
    if len(values) == 1:
        return [Finding("MTU of routes", Verdict.OK, found)]
    which = "; ".join(f"{value}: {', '.join(a for a, mtu in mtus.items() if mtu == value)}" for value in values)
    return [Finding("MTU of routes", Verdict.WARN, which, "set one MTU on all interfaces between the machines")]


def of_port(port: int, usual: str, answers_as: str, *, in_use: bool) -> Finding:
    """``answers_as``: kind of the keepstep service on the port of this machine; empty: none."""
    check = f"port {port} of this machine ({usual})"
    if not in_use:
        return Finding(check, Verdict.OK, "free")
    if answers_as == usual:
        return Finding(check, Verdict.OK, f"{_of_kind(usual)} listens")
    by = f"{_of_kind(answers_as)} of keepstep" if answers_as else "another program"
    return Finding(check, Verdict.WARN, f"in use by {by}", f"start {_of_kind(usual)} with another --bind")


def _of_kind(service: str) -> str:
    return f"a {service} service" if service == "metrics" else f"a {service}"


def of_groups(replicas: Sequence[Mapping[str, Any]], unreachable: Mapping[str, str]) -> list[Finding]:
    """``unreachable``: why the group server at an address does not accept a connection."""
    here = [one for one in replicas if one["state"] != "gone" and one["address"]]
    findings = []
    for one in here:
        if why := unreachable.get(one["address"]):
            advice = "groups connect to each other on every port: open the firewall, or set the Manager's hostname"
            findings.append(Finding(f"group {one['name']} at {one['address']}", Verdict.FAIL, why, advice))
    if here and not findings:
        findings.append(Finding("groups", Verdict.OK, f"all {len(here)} accept connections from this machine"))
    return findings


def of_copies(replicas: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return whether members of a model that exists once have keepers that outlive them."""
    members = [one for one in replicas if one.get("shards") and one["member"]]
    if not members:
        return []
    check = "copies of the model that exists once"
    if len(members) == 1:
        advice = "start a second member on another host: it keeps copies of the shards"
        return [Finding(check, Verdict.WARN, f"{members[0]['name']} is the only member", advice)]
    hosts = {str(one["host"]) for one in members}
    if len(hosts) == 1 and "" not in hosts:
        found = f"all {len(members)} members are on the host {hosts.pop()}, which would take members and keepers along"
        return [Finding(check, Verdict.WARN, found, "start members on several hosts")]
    return [Finding(check, Verdict.OK, f"{len(members)} members keep copies for each other")]


def of_versions(replicas: Sequence[Mapping[str, Any]], here: str) -> list[Finding]:
    """``here``: versions of this machine, as groups report theirs."""
    known = {str(one["runtime"]) for one in replicas if one["state"] != "gone" and one.get("runtime")}
    shown = f"this machine: {here}"
    if len(known) > 1:
        advice = "install the same versions everywhere; `keepstep replicas -o wide` shows them"
        return [Finding("versions", Verdict.WARN, f"groups differ: {'; '.join(sorted(known))}", advice)]
    versions = {one.partition(" on ")[0] for one in known}  # a machine of trainers may have another processor
    if known and here not in versions:
        return [Finding("versions", Verdict.WARN, f"groups: {versions.pop()}; {shown}", "install the same versions")]
    return [Finding("versions", Verdict.OK, shown)]


def of_machine(open_files: int, address: str) -> list[Finding]:
    """``address``: the one under which other machines reach this one."""
    findings = []
    if open_files < FEW_OPEN_FILES:
        advice = "raise it with ulimit -n: Gloo needs a file for each other group"
        findings.append(Finding("open files", Verdict.WARN, f"limit {open_files}", advice))
    else:
        findings.append(Finding("open files", Verdict.OK, f"limit {open_files}"))
    if address.startswith("127."):
        advice = "this machine has no route to others; a job on several machines needs one"
        findings.append(Finding("own address", Verdict.WARN, address, advice))
    else:
        findings.append(Finding("own address", Verdict.OK, address))
    return findings
