"""Decoupled groups of one test, each a thread, and a plain computation of what they should train.

A test lists the rounds: which groups take part, after how many inner steps each, and which of them commit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.optim import Optimizer

from keepstep.lifecycle.background_quorum import Standing
from keepstep.local_sgd.decoupled import fragment_of
from keepstep.process_group.works import CompletedWork
from tests.unit.keepstep.local_sgd.groups import Form, Groups, Lost, Member, inner_of, module_of, train


@dataclass
class Round:
    """One outer step.

    Args:
        inner_steps: of each group that takes part, since its last round.
        commits: groups that commit.
        lost: the first collective fails, in all groups.
    """

    inner_steps: dict[int, int]
    commits: set[int]
    lost: bool = False
    standings: dict[int, Standing] = field(default_factory=dict)
    """Known once the plain computation has run."""

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(len(self.inner_steps), timeout=60)
        self.sent: dict[int, torch.Tensor] = {}


class DecoupledMember(Member):
    """The Manager of one group."""

    def __init__(self, rounds: Sequence[Round], rank: int) -> None:
        super().__init__(Groups(1), rank)
        self.rounds = [one for one in rounds if rank in one.inner_steps]
        self.has_formed = self.synchronized = False

    def use(self, min_groups: int, grace: timedelta) -> None: ...

    def request(self) -> None: ...

    def formed(self) -> bool:
        return self.has_formed

    def withdraw(self) -> None: ...

    def standing(self) -> Standing:
        assert self.open
        return self.rounds[0].standings[self.rank]

    def mark_synchronized(self) -> None:
        self.synchronized = True

    def num_participants(self) -> int:
        return len(self.rounds[0].inner_steps)

    def allreduce(self, tensor: torch.Tensor, **options: Any) -> Work:
        assert self.open
        assert tensor.numel()
        now = self.rounds[0]
        if now.lost:
            return Lost(tensor)
        now.sent[self.rank] = tensor.clone()
        now.barrier.wait()
        total = sum(now.sent[rank] for rank in sorted(now.sent))
        assert isinstance(total, torch.Tensor)
        now.barrier.wait()
        tensor.copy_(total if "reduce_op" in options else total * (1 / len(now.sent)))
        return CompletedWork(tensor)

    def should_commit(self) -> bool:
        assert self.open
        assert self.synchronized
        now = self.rounds.pop(0)
        self.open = self.has_formed = self.synchronized = False
        committed = self.rank in now.commits and not now.lost
        if committed:
            self.step = now.standings[self.rank].step + 1
        return committed


def tokens_of(group: int, step: int) -> int:
    """Tokens of an inner step, sometimes 0."""
    return (7 * group + 3 * step) % 5 * 1000


@dataclass
class OneGroup:
    """The expected state of one group."""

    fragments: list[list[torch.nn.Parameter]]
    trained_from: list[list[torch.Tensor]]
    inner: Optimizer
    weights: list[float]
    step: int = 0
    inner_steps: int = 0
    doubts: dict[int, tuple[int, float, list[torch.Tensor]]] = field(default_factory=dict)


def _copies(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [one.detach().clone() for one in parameters]


@dataclass
class ExpectedMerges:
    """The same training, computed by one process.

    Args:
        forms: of the parameters of each fragment.
        groups: number of groups.
        outer: builds the outer optimizer of a fragment.
        weigh: weight of an inner step, by group and step.
    """

    forms: Sequence[Sequence[Form]]
    groups: int
    outer: Callable[[Any], Optimizer]
    weigh: Callable[[int, int], float]
    step: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.shared = [list(module_of(forms).parameters()) for forms in self.forms]
        self.outers = [self.outer(one) for one in self.shared]
        self.held = [self._group() for _ in range(self.groups)]

    def _group(self) -> OneGroup:
        fragments = [list(module_of(forms).parameters()) for forms in self.forms]
        inner = inner_of([one for fragment in fragments for one in fragment])
        return OneGroup(fragments, [_copies(one) for one in fragments], inner, [0.0] * len(self.forms))

    def newest(self) -> list[int]:
        """Return the groups that hold the state of the job."""
        return [rank for rank, one in enumerate(self.held) if one.step == self.step]

    @torch.no_grad()
    def run(self, rounds: Sequence[Round]) -> None:
        for one in rounds:
            self._run(one)

    def _run(self, now: Round) -> None:
        taking = sorted(now.inner_steps)
        for rank in taking:
            self._train(rank, now.inner_steps[rank])
        behind = [rank for rank in taking if self.held[rank].step < self.step]
        giver = next(rank for rank in taking if rank not in behind)
        now.standings = {
            rank: Standing(self.step, rank in behind, bool(behind), bool(behind) and rank == giver) for rank in taking
        }
        number = fragment_of(self.step, len(self.forms))
        for rank in taking:
            self._resolve(self.held[rank])
        if now.lost:
            return
        average = self._average(taking, number)
        before, step = [_copies(fragment) for fragment in self.shared], self.step
        if now.commits:
            for parameter, gradient in zip(self.shared[number], average, strict=True):
                parameter.grad = gradient
            self.outers[number].step()
            self.step += 1
        for rank in taking:
            one = self.held[rank]
            if rank in now.commits:
                self._commit(one, before if rank in behind else None, number)
            elif one.weights[number]:
                one.doubts[number] = (step, one.weights[number], _copies(one.fragments[number]))

    def _train(self, rank: int, steps: int) -> None:
        one = self.held[rank]
        for _ in range(steps):
            with torch.enable_grad():
                train(one.inner, rank, one.inner_steps)
            for number in range(len(self.forms)):
                one.weights[number] += self.weigh(rank, one.inner_steps)
            one.inner_steps += 1

    def _resolve(self, one: OneGroup) -> None:
        for number, (step, weight, parameters) in one.doubts.items():
            if self.step > step:  # others have committed it
                one.trained_from[number] = parameters
                one.weights[number] -= weight
        one.doubts.clear()

    def _average(self, taking: list[int], number: int) -> list[torch.Tensor]:
        total = sum(self.held[rank].weights[number] for rank in taking)
        sums: list[Any] = [0] * len(self.shared[number])
        for rank in taking:
            one = self.held[rank]
            share = one.weights[number] * len(taking) / total if total else 0.0
            for place, (start, now) in enumerate(zip(one.trained_from[number], one.fragments[number], strict=True)):
                sums[place] = sums[place] + (start - now) * share
        return [one * (1 / len(taking)) for one in sums]

    def _commit(self, one: OneGroup, before: list[list[torch.Tensor]] | None, number: int) -> None:
        if before is not None:
            for fragment, start, shared in zip(one.fragments, one.trained_from, before, strict=True):
                for parameter, old, new in zip(fragment, start, shared, strict=True):
                    parameter.add_(new - old)
            one.trained_from = [_copies(fragment) for fragment in before]
        for parameter, shared in zip(one.fragments[number], self.shared[number], strict=True):
            parameter.copy_(shared)
        one.trained_from[number] = _copies(self.shared[number])
        one.weights[number] = 0.0
        one.step = self.step
