"""The heals of one job that are under way: which the next quorum waits for, and how many of a name failed in a row."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from keepstep_lighthouse.quorum.groups.group import ASKING, HEAL_ENDED, HEAL_PROGRESS, HEALED, HEALING, Group, Heal
from keepstep_mesh.protocol.messages import Healing, QuorumRequest

MAX_REMEMBERED_HEALS = 1000


class OpenHeals:
    """Heals from their first report until their group asks, is excluded, or is lost."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        """The groups that heal, by replica_id."""
        self.waited_for: Counter[int] = Counter()
        """Number of heals that the next quorum waits for, by failed tries of the name."""
        self.failed: OrderedDict[str, int] = OrderedDict()
        """Number of failed heals in a row, by stable name; dropped when a heal completes."""

    def report(self, group: Group, progress: Healing, now: float) -> None:
        """The group reports its heal. Ignored while it is excluded or asks, and once its heal has ended."""
        if group.excluded is not None or group.state in (ASKING, HEALED):
            return
        group.apply(HEAL_ENDED if progress.ended else HEAL_PROGRESS)
        if group.heal is not None:
            group.heal = replace(group.heal, progress=progress)
            return
        group.heal = Heal(progress, now - progress.seconds, self.failed.get(group.name, 0))
        self.groups[group.replica_id] = group
        if not group.heal_given_up:
            self.waited_for[group.heal.failed_tries] += 1

    def give_up(self) -> list[tuple[Group, int]]:
        """A quorum is formed without the groups that still heal: the time limit of their next heal is doubled.

        Returns:
            Each group whose heal was given up now, and how many heals of its name have failed in a row.
        """
        given_up = []
        for group in self.groups.values():
            if group.heal is not None and group.state is HEALING and not group.heal_given_up:
                failed = group.heal.failed_tries + 1
                self.failed[group.name] = failed
                self.failed.move_to_end(group.name)
                given_up.append((group, failed))
            group.heal_given_up = True
        self.waited_for.clear()
        while len(self.failed) > MAX_REMEMBERED_HEALS:
            self.failed.popitem(last=False)
        return given_up

    def end(self, group: Group, request: QuorumRequest) -> None:
        """``request`` ends the heal of the group, if any. It proves that the heal completed, unless its step failed."""
        if group.heal is None:
            return
        if not group.heal_given_up and request.commit_failures == 0:
            self.failed.pop(group.name, None)
        if group.heal.progress.ended and not group.heal.progress.error:
            group.diverged = False
        self.drop(group)

    def drop(self, group: Group) -> None:
        """Forget the heal of the group, if any, and its count; the state follows with the action that ended it."""
        if group.heal is None:
            return
        del self.groups[group.replica_id]
        if not group.heal_given_up:
            failed_tries = group.heal.failed_tries
            self.waited_for[failed_tries] -= 1
            if not self.waited_for[failed_tries]:
                del self.waited_for[failed_tries]
        group.heal = None

    def validate(self, groups: Iterable[Group]) -> None:
        """Raise AssertionError with a sentence when these heals are not those of ``groups``."""
        healing = {g.replica_id: (g, g.heal) for g in groups if g.heal is not None}
        assert set(self.groups) == set(healing), "healing groups are misfiled"
        waited_for = Counter(heal.failed_tries for g, heal in healing.values() if not g.heal_given_up)
        assert self.waited_for == waited_for, "heals are miscounted"
