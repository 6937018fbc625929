"""The replica groups of a run of Ray Train: each has a placement group of its own, and starts and ends as a whole.

Ray 2.60 knows replica groups of one worker only, which share one placement group, and an elastic size restarts all of
them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from keepstep.integrations.ray.ray_classes import GroupOfWorkers, PlacementHandle, StartupFailed, WorkerGroup, ray
from keepstep.manager import running_managers
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.threads.starting import ThreadPoolExecutor

log = get_logger("keepstep.integrations.ray")

POLL_SECONDS = 0.2
"""Pause before Ray is asked again whether a group has its place, at the start of a run."""


@dataclass
class Slot:
    """One replica group of a run."""

    placement: Any
    """Its placement group, of a bundle for each rank."""
    workers: Any = None
    """Ray's group of its workers, in the order of their ranks; None: it has none, and waits for its place."""
    leaves: bool = False
    """Whether it was asked to leave, because the run gets smaller."""

    def placed(self) -> bool:
        """Whether all its bundles have a node now."""
        return bool(ray.util.placement_group_table(self.placement)["state"] == "CREATED")


class Places(PlacementHandle):  # type: ignore[misc]
    """The placement groups of all groups, as the one placement group that Ray Train expects.

    Args:
        slots: of the run; they may change.
        least: number of groups that a start needs. It waits for the others until its limit only.
    """

    def __init__(self, slots: dict[int, Slot], least: int) -> None:
        self._slots, self._least = slots, least

    @property
    def placement_group(self) -> Any:
        """That of one group, for Ray's cleaner of runs whose controller died."""
        return self._slots[min(self._slots)].placement

    def ready(self) -> Any:
        """An object that exists when that placement group is ready."""
        return self.placement_group.ready()

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Wait until all groups have a place. At the limit, return whether enough of them have one."""
        end = time.monotonic() + timeout_seconds
        while True:
            placed = sum(slot.placed() for slot in self._slots.values())
            if placed == len(self._slots) or time.monotonic() > end:
                return placed >= self._least
            time.sleep(POLL_SECONDS)  # nothing announces all groups at once

    def shutdown(self) -> None:
        """Give all places back."""
        for slot in self._slots.values():
            ray.util.remove_placement_group(slot.placement)
        self._slots.clear()


class ReplicaGroups(WorkerGroup):  # type: ignore[misc]
    """The workers of a run. Its controller calls it from one thread.

    The number of a group stays the same when it starts again. The workers of Ray are those of all groups that run, in
    the order of these numbers.
    """

    _worker_group_state: Any
    _world_rank_to_ongoing_poll: dict[int, Any]

    def __init__(self, run: Any, context: Any, callbacks: Any = None) -> None:
        super().__init__(run, context, callbacks)
        self._ranks: int = run.backend_config.ranks
        self._slots: dict[int, Slot] = {}
        self._seen: Any = None
        """The poll whose failures have been handled."""

    # What Ray calls at the start of a run

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Places:
        self._slots = {number: self._slot(number) for number in range(worker_group_context.num_workers // self._ranks)}
        return Places(self._slots, least=min(len(self._slots), scaling_config.min_workers // self._ranks))

    def _create_workers(self, *_arguments: Any, **_named: Any) -> list[Any]:
        placed = [number for number, slot in self._slots.items() if slot.placed()]
        with ThreadPoolExecutor(len(placed)) as threads:
            return [worker for workers in threads.map(self._start_workers, placed) for worker in workers]

    def _init_train_context(self, workers: list[Any], sync_actor: Any) -> None:
        self._count()  # Ray has counted each worker as a group
        super()._init_train_context(workers, sync_actor)

    # While it trains

    def poll_status(self, timeout: float | None = None) -> Any:
        """Start the groups that have a place now, ask all workers for their state, and free groups that have left."""
        self._start_placed()
        status = super().poll_status(timeout)
        of_rank = status.worker_rank_to_replica_group_rank
        busy = {of_rank[rank] for rank, one in status.worker_statuses.items() if one.running or one.error}
        for number in [number for number, slot in self._slots.items() if slot.leaves and number not in busy]:
            self._end(number)
            ray.util.remove_placement_group(self._slots.pop(number).placement)
            log.info("a group has left the run", group=number)
        return status

    def survivors(self) -> bool:
        """Whether a group lives on, after the failures of the last poll."""
        status = self.get_latest_poll_status()
        return status is not None and status.failing_replica_group_indices != status.all_replica_group_indices

    def resize(self, groups: int) -> None:
        """End the groups that the last poll found failing, and bring the run to so many groups.

        The others train on. A group that fails keeps its place, if the nodes live. A smaller run loses first the groups
        without a place, then those with the highest numbers, which leave after their step. New groups get the lowest
        free numbers, and start when Ray has a place for them.
        """
        status = self.get_latest_poll_status()
        failing = set() if status is self._seen else status.failing_replica_group_indices
        self._seen = status
        for number in failing & self._slots.keys():
            log.warning("a worker failed; the ranks of its group end, and start again", group=number)
            self._end(number)
        if failing:
            self._release_barriers()
        stay = {number: slot.workers is not None for number, slot in self._slots.items() if not slot.leaves}
        leaving, new = change_of_size(groups, stay, taken=self._slots.keys())
        for number in leaving:
            self._leave(number)
        for number in new:
            self._slots[number] = self._slot(number)
        self._start_placed()

    # One group

    def _slot(self, number: int) -> Slot:
        context = self._worker_group_context
        labels = context.label_selector or None
        if labels is not None:  # one for each worker of the first start
            ranks = range(number * self._ranks, (number + 1) * self._ranks)
            labels = [labels[min(rank, len(labels) - 1)] for rank in ranks]
        bundles = [context.resources_per_worker] * self._ranks
        return Slot(
            ray.util.placement_group(bundles, strategy=context.placement_strategy, bundle_label_selector=labels)
        )

    def _start_placed(self) -> None:
        for number, slot in sorted(self._slots.items()):
            if slot.workers is None and slot.placed():
                self._start_group(number)

    def _start_group(self, number: int) -> None:
        """Start the workers of a group and their training function, while others train."""
        slot = self._slots[number]
        try:
            workers = self._start_workers(number)
            self._init_train_context(workers, self._worker_group_state.sync_actor)
            slot.workers.start_training(self._worker_group_context)
        except Exception as error:
            self._end(number)
            if isinstance(error, ray.exceptions.RayActorError):
                raise StartupFailed(f"group {number} did not start") from error  # Ray Train tries again
            raise
        log.info("a group has started", group=number, nodes=[worker.metadata.node_ip for worker in workers])

    def _start_workers(self, number: int) -> list[Any]:
        slot = self._slots[number]
        workers: list[Any] = super()._create_workers(
            self._ranks,
            slot.placement,
            self._worker_group_context.resources_per_worker,
            starting_world_rank=number * self._ranks,
            world_size=(max(self._slots) + 1) * self._ranks,
            replica_group_size=self._ranks,
        )
        resources = self._worker_group_context.resources_per_worker
        slot.workers = GroupOfWorkers(workers, resources, self._replica_group_callbacks)
        return workers

    def _end(self, number: int) -> None:
        """End all workers of a group. It keeps its place."""
        slot = self._slots[number]
        if slot.workers is not None:
            slot.workers.shutdown()
            slot.workers, slot.leaves = None, False
            self._count()

    def _leave(self, number: int) -> None:
        """Let a group leave after its step; without workers, it is gone at once."""
        slot = self._slots[number]
        if slot.workers is None:
            ray.util.remove_placement_group(self._slots.pop(number).placement)
        else:
            slot.leaves = True
            slot.workers.execute_async(leave)

    # Ray's tables

    def _count(self) -> None:
        """Write the workers of the groups that run into the tables of Ray."""
        running = {number: slot.workers for number, slot in sorted(self._slots.items()) if slot.workers is not None}
        self._replica_groups = list(running.values())
        numbers = [number for number, group in running.items() for _ in group.get_workers()]
        self._worker_rank_to_replica_group_rank = dict(enumerate(numbers))
        if (state := self._worker_group_state) is not None:
            polls = {id(state.workers[rank]): poll for rank, poll in self._world_rank_to_ongoing_poll.items()}
            workers = [worker for group in running.values() for worker in group.get_workers()]
            self._worker_group_state = replace(state, workers=workers)
            kept = {rank: polls.get(id(worker)) for rank, worker in enumerate(workers)}
            self._world_rank_to_ongoing_poll = {rank: poll for rank, poll in kept.items() if poll is not None}

    def _release_barriers(self) -> None:
        """Let workers go on that wait for a failed one in ``ray.train.report``."""
        ray.get(self._worker_group_state.sync_actor.reset.remote())
        ignore_deaths(worker.actor.clear_result_queue.remote() for worker in self.get_workers())


def change_of_size(groups: int, stay: Mapping[int, bool], taken: Collection[int] = ()) -> tuple[list[int], list[int]]:
    """Return which groups leave, and the numbers of new ones, so that a run has so many groups.

    Groups without workers leave first, then those with the highest numbers. New ones get the lowest free numbers.

    Args:
        groups: number of groups to have.
        stay: number of each group that does not leave yet, and whether it has workers.
        taken: further numbers that no new group gets, of groups that leave.
    """
    in_order = sorted(stay, key=lambda number: (not stay[number], number))
    used = {*stay, *taken}
    free = (number for number in itertools.count() if number not in used)
    return in_order[groups:], list(itertools.islice(free, max(0, groups - len(stay))))


def ignore_deaths(calls: Iterable[Any]) -> None:
    """Wait for calls to actors. The next poll finds those that have died."""
    for call in list(calls):
        try:
            ray.get(call)
        except ray.exceptions.RayActorError:
            log.info("a worker died in the meantime")


def leave() -> None:
    """Let the Managers of this worker leave after their step. Runs in the worker."""
    for manager in running_managers():
        manager.leave_soon("the run gets smaller")
