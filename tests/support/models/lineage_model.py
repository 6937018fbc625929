"""Every short history of a few replica groups: commits, partial commits, cuts, deaths, resumes, zombies.

Explored breadth first with the real ``GroupProgress``, ``make_plan`` and order of states. Abstract parts: weights are
the events that made them; the lighthouse is its rule for quorum_ids; a group that takes no part in a round is cut off
or frozen, so a group that comes back later with an old state is a zombie.

Beside the lineages, which the model judges, each state carries the truth about itself. The invariants:

* ``equal``: over all states that were ever held, equal (step, lineage) means equal weights.
* ``resume``: work that was done after a resume is never given up for older work.
* ``progress``: else the job goes on from the highest step that is there.
* ``sound``: no group heals from a state while a sounder one is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep.step.progress import GroupProgress
from keepstep_mesh.protocol.lineage import DIVERGED as DIVERGED_NAME
from keepstep_mesh.protocol.lineage import NEW, origin, repeats_steps
from keepstep_mesh.protocol.membership import Lineage, Member, MemberInfo
from keepstep_mesh.protocol.messages import Quorum

INFO = MemberInfo("http://here")
TORN, DIVERGED, UNTRAINED, BEHIND, SOUND = range(5)


class Truth(NamedTuple):
    """Of a state."""

    weights: tuple[Any, ...]
    soundness: int
    resumed: int
    """The round in which its history last went on from a checkpoint; 0: never."""


class Checkpoint(NamedTuple):
    step: int
    lineage: Lineage | None
    truth: Truth

    def manager(self, *, with_lineage: bool) -> dict[str, Any]:
        named = with_lineage and self.lineage is not None
        return {"step": self.step, "batches_committed": 0} | ({"lineage": self.lineage} if named else {})


class Group(NamedTuple):
    replica_id: str
    step: int
    lineage: Lineage
    failed: bool
    fell_behind: int
    is_loaded: bool
    truth: Truth

    def progress(self) -> GroupProgress:
        progress = GroupProgress(self.replica_id, self.lineage)
        progress.step, progress.commit_failures = self.step, int(self.failed)
        progress._fell_behind = self.fell_behind
        return progress

    def at(self, progress: GroupProgress, truth: Truth, *, is_loaded: bool = False) -> Group:
        failed = progress.commit_failures > 0
        return Group(self.replica_id, progress.step, progress.lineage, failed, progress._fell_behind, is_loaded, truth)


class World(NamedTuple):
    groups: tuple[Group, ...]
    quorum_id: int
    members: tuple[str, ...]
    held: frozenset[tuple[int, Lineage, tuple[Any, ...]]]
    """(step, lineage, weights) of every state since the beginning."""
    checkpoints: frozenset[Checkpoint]


class Violation(NamedTuple):
    rule: str
    story: tuple[str, ...]


class Model:
    """Args:
    init_sync: else groups begin with equal weights.
    behind: some rounds end without a heal, with and without ``mark_synchronized``.
    lineages: checkpoints keep them; else those that are loaded are torchft's, of the common steps.
    in_process: checkpoints are loaded by running groups, too.
    broken: states tear and diverge, those of one incarnation once.
    """

    def __init__(
        self,
        names: str = "ab",
        *,
        init_sync: bool = True,
        behind: bool = False,
        lineages: bool = True,
        in_process: bool = False,
        broken: bool = False,
    ) -> None:
        self._init_sync = init_sync
        self._behind, self._lineages, self._in_process, self._broken = behind, lineages, in_process, broken
        groups = tuple(self._new(name, 0) for name in names)
        self.worlds = 0
        self._old_checkpoints: frozenset[Checkpoint] = frozenset()
        self._start = self._noted(World(groups, 0, (), frozenset(), frozenset()))

    def explore(self, depth: int, common_steps: int = 0) -> Violation | None:
        """Return the first violation, if any, within ``depth`` events after ``common_steps`` steps of all groups."""
        world, everybody = self._start, tuple(range(len(self._start.groups)))
        for number in range(1, common_steps + 1):
            world = self._round(world, number, everybody, everybody, None)[0]
        self._old_checkpoints = world.checkpoints
        layer: dict[World, tuple[str, ...]] = {world: ()}
        for number in range(common_steps + 1, common_steps + depth + 1):
            following: dict[World, tuple[str, ...]] = {}
            for known, story in layer.items():
                for what, changed, broken in self._events(known, number):
                    if broken is not None:
                        return Violation(broken, (*story, what))
                    following.setdefault(changed, (*story, what))
            layer = following
            self.worlds += len(layer)
        return None

    # ---- what may happen

    def _events(self, world: World, number: int) -> Iterator[tuple[str, World, str | None]]:
        for members in _subsets(range(len(world.groups))):
            for marked in (None, *_subsets(members, empty=True)) if self._behind else (None,):
                for committing in _subsets(members) if marked is None else (members,):
                    changed, broken = self._round(world, number, members, committing, marked)
                    names = [[world.groups[i].replica_id for i in some] for some in (members, committing, marked or ())]
                    what = f"quorum {changed.quorum_id} of {names[0]}, {names[1]} commit"
                    yield what if marked is None else f"{what}, no group heals, {names[2]} mark", changed, broken
        for i, group in enumerate(world.groups):
            name = group.replica_id.partition(":")[0]
            fresh = self._new(name, number)
            yield f"{fresh.replica_id} starts", self._with(world, i, fresh), None
            for checkpoint in world.checkpoints if self._lineages else self._old_checkpoints:
                for target in (fresh, group) if self._in_process else (fresh,):
                    progress = target.progress()
                    progress.resume(checkpoint.manager(with_lineage=self._lineages))
                    loaded = target.at(progress, checkpoint.truth, is_loaded=True)
                    what = f"{target.replica_id} loads step {checkpoint.step} of {checkpoint.lineage!r}"
                    changed = self._with(world, i, loaded)
                    yield what, changed, self._apart(changed)
            lineages = {lineage for _, lineage, _ in world.held}
            if self._broken and f"{DIVERGED_NAME}{group.replica_id}" not in lineages:
                for soundness in (TORN, DIVERGED):
                    progress = group.progress()
                    (progress.tear if soundness == TORN else progress.diverge)()
                    truth = Truth((group.replica_id, number, soundness), soundness, group.truth.resumed)
                    changed = self._with(world, i, group.at(progress, truth))
                    yield f"{group.replica_id} breaks to {progress.lineage!r}", changed, self._apart(changed)

    def _new(self, name: str, number: int) -> Group:
        replica_id = f"{name}:{number}"
        weights = (replica_id,) if self._init_sync else ("initial",)
        lineage = f"{NEW}{replica_id}" if self._init_sync else ""
        return Group(replica_id, 0, lineage, False, 0, False, Truth(weights, UNTRAINED, 0))

    def _with(self, world: World, i: int, group: Group) -> World:
        groups = list(world.groups)
        groups[i] = group
        return self._noted(world._replace(groups=tuple(groups)))

    @staticmethod
    def _noted(world: World) -> World:
        whole = [one for one in world.groups if one.truth.soundness != TORN]
        held = {(one.step, one.lineage, one.truth.weights) for one in whole}
        written = {
            Checkpoint(one.step, one.progress().state_dict().get("lineage"), one.truth)
            for one in whole
            if one.step and not one.is_loaded
        }
        return world._replace(held=world.held | held, checkpoints=world.checkpoints | written)

    # ---- a round

    def _round(
        self,
        world: World,
        number: int,
        members: tuple[int, ...],
        committing: tuple[int, ...],
        marked: tuple[int, ...] | None,
    ) -> tuple[World, str | None]:
        """``marked``: groups that call ``mark_synchronized`` in a round without heals; None: a round with heals."""
        groups = [world.groups[i] for i in members]
        listed = tuple(Member(one.replica_id, one.step, one.lineage, 0, False, INFO) for one in groups)
        plan = _plan(listed)
        ids = tuple(one.replica_id for one in groups)
        reached = max(origin(one.lineage).quorum_id for one in groups)
        same = ids == world.members and not any(one.failed for one in groups) and reached <= world.quorum_id
        quorum_id = world.quorum_id
        if not same or repeats_steps(plan.lineage):
            quorum_id = max(quorum_id, reached) + 1
        reference = groups[plan.cohort[0]]
        broken = _judged(reference, groups)
        if reference.truth.soundness == TORN:  # all of them end
            return world, broken
        resumed = number if reference.is_loaded else reference.truth.resumed
        common = Truth((reference.truth.weights, number), SOUND, resumed)
        changed = list(world.groups)
        for rank, i in enumerate(members):
            group, progress = world.groups[i], world.groups[i].progress()
            if i not in committing:
                progress.discard()
                changed[i] = group.at(progress, group.truth, is_loaded=group.is_loaded)
                continue
            healed = rank in plan.cohort or marked is None
            truth = common
            if marked is not None and i in marked:
                progress.commit_synchronized(plan.max_step, plan.lineage, 0, quorum_id, 1)
                truth = Truth(("average", number), SOUND, resumed)
            elif healed:
                progress.step, progress.lineage = plan.max_step, plan.lineage
                progress.commit(quorum_id, 1, behind=False)
            else:
                progress.commit(quorum_id, 1, behind=True)
                soundness = min(group.truth.soundness, BEHIND) if group.truth.soundness < UNTRAINED else BEHIND
                truth = Truth((group.truth.weights, number, group.replica_id), soundness, group.truth.resumed)
            changed[i] = group.at(progress, truth)
        after = self._noted(world._replace(groups=tuple(changed), quorum_id=quorum_id, members=ids))
        return after, broken or self._apart(after)

    @staticmethod
    def _apart(world: World) -> str | None:
        return "equal" if len({one[:2] for one in world.held}) < len(world.held) else None


@lru_cache(100_000)
def _plan(listed: tuple[Member, ...]) -> QuorumPlan:
    return make_plan(Quorum(0, 1, 1, 0, 0, 0, "", 0, uniform=False, listed=listed), listed[0].replica_id)


def _judged(reference: Group, groups: list[Group]) -> str | None:
    best = max(one.truth.soundness for one in groups)
    if reference.truth.soundness < best:
        return "sound"
    eligible = [one for one in groups if one.truth.soundness == best]
    if best == SOUND and reference.truth.resumed < max(one.truth.resumed for one in eligible):
        return "resume"
    eligible = [one for one in eligible if best < SOUND or one.truth.resumed == reference.truth.resumed]
    return "progress" if reference.step < max(one.step for one in eligible) else None


def _subsets(items: Any, *, empty: bool = False) -> Iterator[tuple[Any, ...]]:
    several = tuple(items)
    for bits in range(0 if empty else 1, 1 << len(several)):
        yield tuple(one for i, one in enumerate(several) if bits >> i & 1)
