"""Require that all groups of a job train the same parameters with the same settings. Pure.

* A request is compared with the members of the quorum when it arrives, and denied if it differs from them.
* Members may change their parameters between two steps, in all groups alike. Their requests, and those that no member
  can judge, as in the first quorum, are compared when a quorum is about to form.
* Then the members at the highest step decide, because the others heal from them; without a member, all. The value of
  more than half of them is right. Without a majority, the value before is. If none of them has that, all are denied,
  because the right value is unknown.
* Sound machines of one kind have equal bits. The matrix products that groups report are compared among the groups with
  equal processors, libraries and numbers of threads, when a quorum is about to form. All of them decide, because no
  state depends on it. The machine of a group with other bits computes wrong.
* A group that gives an address of loopback can be reached from its own machine only. It is denied beside a group that
  connected from another address, and so is a group that joins such a member, unless both are on the machine of the
  lighthouse.

Unknown values fit all: a Manager may ask before its model is wrapped, and a client without a Manager has neither
settings nor parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from keepstep_lighthouse.quorum.groups.group import Excluded, Exclusion, Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.views.reasons import named
from keepstep_mesh.protocol import membership
from keepstep_mesh.protocol.membership import differ
from keepstep_mesh.protocol.messages import Denied, QuorumRequest

MAX_KINDS = 100
"""Limit of the conditions of products that are remembered."""
_LOOPBACK = re.compile(r"(https?:)?//(127\.|\[?::1\b|localhost\b)")


class Agreements:
    def __init__(self, job: JobState) -> None:
        self._job = job
        self.settings = self.layout = ""
        """Those of the last quorum whose members know theirs."""
        self.products: dict[str, str] = {}
        """Digest of the product of the last quorum, by its conditions (``MemberInfo.product``)."""
        self.compared = True
        """False: a request differs from them, and no member of the quorum can judge it."""

    def fits(self, group: Group, request: QuorumRequest) -> bool:
        """Return whether the group fits the other members. Deny the request if not."""
        if not group.member and (unreachable := self._unreachable(group)):
            self.deny(group, request, unreachable, "")
            return False
        settings, layout = group.settings, group.info.layout
        if (settings != self.settings and settings) or (layout != self.layout and layout):
            differs = differ(settings, self.settings) or differ(layout, self.layout)
            others = (one for one in self._job.groups if one is not group) if differs else ()
            member = next((one for one in others if self._is_agreed_member(one, group)), None)
            if member is not None:
                self._deny(group, request, member, f"the job follows {member.name}")
                return False
            self.compared = False
        conditions, digest = _product(group)
        if digest and self.products.get(conditions) != digest:
            self.compared = False
        if group.is_excluded(Exclusion.LAYOUT):
            self._job.groups.readmit(group)
        return True

    def settle(self) -> bool:
        """Compare the open requests before a quorum forms, and deny those that differ. Return whether any was denied.

        No effect if all are of members, and ``compared``.
        """
        self.compared = True
        self.settings, settings_denied = self._settle(_settings, self.settings)
        self.layout, layout_denied = self._settle(_layout, self.layout)
        return self._settle_products() or settings_denied or layout_denied

    def _settle_products(self) -> bool:
        """Compare the products of all open requests with equal conditions. Return whether any request was denied."""
        any_denied = False
        for kind in sorted({_product(group)[0] for group in self._job.groups.all_asking()} - {""}):

            def digest(group: Group, kind: str = kind) -> str:
                conditions, its = _product(group)
                return its if conditions == kind else ""

            self.products[kind], denied = self._settle(digest, self.products.get(kind, ""), members_decide=False)
            any_denied |= denied
        while len(self.products) > MAX_KINDS:
            del self.products[next(iter(self.products))]
        return any_denied

    def _is_agreed_member(self, member: Group, group: Group) -> bool:
        """Return whether ``member`` has a value of the last quorum, and ``group`` one that no member may change to."""
        if not member.member or member.is_excluded(Exclusion.LAYOUT):
            return False
        agreed = [(_settings, self.settings)] + ([] if group.member else [(_layout, self.layout)])
        return any(value(member) == its and differ(value(group), its) for value, its in agreed)

    def _settle(self, value: Callable[[Group], str], agreed: str, *, members_decide: bool = True) -> tuple[str, bool]:
        """Compare one value of all open requests.

        Args:
            value: of a group; empty: unknown.
            agreed: that of the last quorum.
            members_decide: the members at the highest step decide, if any knows its value. False: all groups do.

        Returns:
            The value of all groups that still ask, or ``agreed`` if none knows its own; whether a request was denied.
        """
        known = [group for group in self._job.groups.all_asking() if value(group)]
        members = [group for group in known if group.member and members_decide]
        newest = max((group.step for group in members), default=0)
        sides: dict[str, list[Group]] = {}
        for group in [group for group in members if group.step == newest] or known:
            sides.setdefault(value(group), []).append(group)
        without_majority = agreed if agreed in sides else ""
        votes = sum(map(len, sides.values()))
        right = next((side for side, groups in sides.items() if 2 * len(groups) > votes), without_majority)
        wrong = [group for group in known if value(group) != right]
        why = f"the job follows {_named(sides[right])}" if right else _no_majority(sides)
        for group in wrong:
            other = sides[right or next(side for side in sides if side != value(group))][0]
            if group.request is not None:
                self._deny(group, group.request, other, why)
        return right or agreed, bool(wrong)

    def _unreachable(self, group: Group) -> str:
        """Return why ``group`` and another group cannot reach each other; empty: nothing is known against it."""
        for other in self._job.groups:
            near, far = (group, other) if _is_near(group) else (other, group)
            if other.session is None or near.host == far.host:  # one machine, perhaps behind an address of containers
                continue
            if near.local and far.local:
                continue
            if far.host and not _LOOPBACK.match(f"//{far.host}") and _is_near(near):
                return (
                    f"{near.name} gives {near.info.address} as its address, which {far.name} at {far.host} cannot "
                    f"reach; give {near.name} the address of the lighthouse that other machines use (--lighthouse, "
                    f"KEEPSTEP_LIGHTHOUSE), or pass its own as Manager(hostname=...)"
                )
        return ""

    def _deny(self, group: Group, request: QuorumRequest, other: Group, why: str) -> None:
        """Deny the request, because the group differs from ``other``. ``why``: reason for which it is refused."""
        if sentence := _other_product(group, other):
            self.deny(group, request, f"{sentence}; {why}", "", code="machine")
            return
        difference, remedy, address = _difference(group, other)
        last = other.request is not None and other.request.final
        step = max(0, other.step - 1) if last else other.step
        self.deny(group, request, f"{difference}; {why}{remedy}", address, step if address else 0)

    def deny(
        self,
        group: Group,
        request: QuorumRequest,
        sentence: str,
        address: str,
        peer_step: int = 0,
        code: str = "layout",
    ) -> None:
        """Deny the request of a group that differs.

        ``address``: of a group server with details of the difference. ``peer_step``: the step that its group takes.
        """
        self._job.groups.withdraw(group)
        group.highest_request = max(group.highest_request, request.request)
        if group.excluded is None or group.is_excluded(Exclusion.LAYOUT):
            self._job.groups.exclude(group, Excluded(Exclusion.LAYOUT, sentence))
        self._job.groups.set_size(group, 0)
        if group.session is not None:
            self._job.tell(group.session, Denied(request.request, code, sentence, address, peer_step=peer_step))
            self._job.log("denied", group.replica_id, code=code, reason=sentence)


def _settings(group: Group) -> str:
    return group.settings


def _layout(group: Group) -> str:
    return group.info.layout


def _product(group: Group) -> tuple[str, str]:
    """Return the conditions and the digest of its product; two empty strings: unknown."""
    conditions, _, digest = group.info.product.rpartition("=")
    return conditions, digest


def _other_product(group: Group, other: Group) -> str:
    """Return how two groups with nothing but other products differ; empty: they differ in something else."""
    (conditions, digest), (theirs, its) = _product(group), _product(other)
    if conditions != theirs or digest == its or differ(_settings(group), _settings(other)):
        return ""
    if differ(_layout(group), _layout(other)):
        return ""
    return (
        f"the machine of {_at(group)} computes another matrix product than that of {_at(other)}, and both are "
        f"{conditions}: one of them computes wrong"
    )


def _at(group: Group) -> str:
    return f"{group.name} at {group.host}" if group.host else group.name


def _no_majority(sides: dict[str, list[Group]]) -> str:
    return f"no side has a majority ({' against '.join(map(_named, sides.values()))}), so all are refused"


def _named(groups: list[Group]) -> str:
    return named(group.name for group in groups)


def _is_near(group: Group) -> bool:
    return _LOOPBACK.match(group.info.address) is not None


def _difference(group: Group, other: Group) -> tuple[str, str, str]:
    """Return the difference, the remedy, and the group server to compare with if the difference has no details."""
    mine, its = _settings(group), _settings(other)
    if differ(mine, its):
        what = membership.difference(mine, group.name, its, other.name)
        return what, "; give all groups the same value; to change it, stop and restart all groups of the job", ""
    return f"the parameters of {group.name} differ from those of {other.name}", "", other.info.address
