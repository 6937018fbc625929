"""Groups that take part in steps without healing: what they hold then, and when they count as equal again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import Manager
from tests.services.manager.agreement.test_verification import Job
from tests.services.manager.groups import events, manager, together

State = dict[str, Any]


class Groups:
    """Each begins at step 5 with weights and a lineage of its own, takes the same steps, and says what it held."""

    def __init__(self, lighthouse: str, **lineages: int | str) -> None:
        self._lighthouse, self._lineages = lighthouse, lineages
        self.ready = threading.Barrier(len(lineages))

    def run(self, act: Callable[[str, Manager, State], Any]) -> dict[str, Any]:
        said = together(*(lambda n=n: self._group(n, act) for n in self._lineages))
        return dict(zip(self._lineages, said, strict=True))

    def _group(self, name: str, act: Callable[[str, Manager, State], Any]) -> Any:
        lineage = self._lineages[name]
        value = float(lineage) if isinstance(lineage, int) else 9.0
        state = {"w": torch.full((2,), value)}
        with manager(self._lighthouse, name, state) as m:
            m.load_state_dict({"step": 5, "batches_committed": int(value), "lineage": lineage})
            self.ready.wait(30)
            said = act(name, m, state)
            self.ready.wait(30)
            return said


def average(m: Manager, state: State, *, mark: bool, fails: bool = False) -> bool:
    """A step of LocalSGD's kind: no group heals, the parameters themselves are averaged."""
    m.start_quorum(allow_heal=False)
    weights = state["w"].clone()
    m.allreduce(weights).wait()
    if mark:
        m.mark_synchronized()
    if fails:
        m.report_error(RuntimeError("out of memory"))
    if not m.should_commit():
        return False
    state["w"] = weights
    return True


def train(m: Manager, state: State) -> bool:
    m.start_quorum()
    gradient = torch.ones(2)
    m.allreduce(gradient).wait()
    committed = m.should_commit()
    if committed:
        state["w"] = state["w"] + gradient
    return committed


def held(m: Manager, state: State) -> tuple[State, list[float]]:
    return m.state_dict(), state["w"].tolist()


def test_groups_that_say_that_they_are_equal_are_and_nobody_heals(lighthouse: str, steps: Path) -> None:
    job = Job(lighthouse)

    def act(_name: str, m: Manager, state: State) -> Any:
        assert average(m, state, mark=True)
        then = held(m, state)
        job.change(verify_every=1)
        for _ in range(3):
            assert train(m, state)
        return then, held(m, state)

    said = Groups(lighthouse, a=1, b=2, c=3).run(act)
    assert said["a"] == said["b"] == said["c"]
    (manager_state, weights), _ = said["a"]
    assert (manager_state["step"], manager_state["batches_committed"], weights) == (6, 6, [2.0, 2.0])
    assert "healed" not in events(steps)
    assert job.found("replicas_verified")
    assert not job.found("replicas_differ")


def test_groups_that_do_not_say_so_are_not_equal_and_heal_next_time(lighthouse: str, steps: Path) -> None:
    def act(_name: str, m: Manager, state: State) -> Any:
        assert average(m, state, mark=False)
        then = held(m, state)
        assert train(m, state)
        return then, held(m, state)

    said = Groups(lighthouse, a=1, b=2, c=3).run(act)
    assert [one[0][0]["step"] for one in said.values()] == [6, 6, 6]
    assert len({one[0][0]["lineage"] for one in said.values()}) == 3
    assert said["a"][1] == said["b"][1] == said["c"][1]
    assert events(steps).count("healed") == 2


def test_a_group_that_says_so_is_not_equal_to_one_that_does_not(lighthouse: str, steps: Path) -> None:
    def act(name: str, m: Manager, state: State) -> Any:
        assert average(m, state, mark=name == "a")
        then = held(m, state)
        assert train(m, state)
        return then, held(m, state)

    said = Groups(lighthouse, a=2, b=2).run(act)
    assert said["a"][0][0]["step"] == said["b"][0][0]["step"]
    assert said["a"][0][0]["lineage"] != said["b"][0][0]["lineage"]
    assert said["a"][1] == said["b"][1]
    assert events(steps).count("healed") == 1


def test_saying_so_in_a_step_that_does_not_commit_has_no_effect(lighthouse: str) -> None:
    def act(name: str, m: Manager, state: State) -> Any:
        before = held(m, state)
        if name == "a":
            assert not average(m, state, mark=True, fails=True)
            assert held(m, state) == before
        else:  # its part in the all-reduce was made, or it failed with the other's
            average(m, state, mark=True)
        for _ in range(2):
            train(m, state)
        return held(m, state)

    said = Groups(lighthouse, a=1, b=2).run(act)
    assert said["a"] == said["b"]


def test_only_in_a_step_can_a_group_say_so(lighthouse: str) -> None:
    with manager(lighthouse, "a") as m, pytest.raises(RuntimeError, match="call start_quorum"):
        m.mark_synchronized()


def test_when_only_groups_are_left_that_were_behind_they_go_on_from_one_of_them(lighthouse: str, steps: Path) -> None:
    gone = threading.Event()

    def act(name: str, m: Manager, state: State) -> Any:
        assert average(m, state, mark=False)
        if name == "c":
            m.shutdown()
            gone.set()
            return None
        assert gone.wait(30)
        then = held(m, state)
        while not train(m, state):
            pass
        return then, held(m, state)

    def group(name: str, lineage: int) -> Any:
        state = {"w": torch.full((2,), float(lineage))}
        with manager(lighthouse, name, state) as m:
            m.load_state_dict({"step": 5, "batches_committed": 5, "lineage": lineage})
            ready.wait(30)
            said = act(name, m, state)
            ready.wait(30)
            return said

    ready = threading.Barrier(3)
    a, b, _ = together(lambda: group("a", 1), lambda: group("b", 2), lambda: group("c", 3))
    assert a[0][0]["lineage"] != b[0][0]["lineage"]
    assert a[1] == b[1]
    assert isinstance(a[1][0]["lineage"], int), "it is the job's state from now on"
    assert events(steps).count("healed") == 1


def test_groups_that_load_one_checkpoint_of_a_group_that_was_behind_are_equal(lighthouse: str, steps: Path) -> None:
    def act(_name: str, m: Manager, state: State) -> Any:
        assert train(m, state)
        return m.state_dict()

    said = Groups(lighthouse, a="behind:x:0:1", b="behind:x:0:1").run(act)
    assert said["a"] == said["b"]
    assert "healed" not in events(steps)


def test_a_group_that_loads_a_checkpoint_of_one_that_was_behind_heals_from_one_that_was_not(
    lighthouse: str, steps: Path
) -> None:
    def act(_name: str, m: Manager, state: State) -> Any:
        assert train(m, state)
        return held(m, state)

    said = Groups(lighthouse, a="behind:x:0:1", b=2).run(act)
    assert said["a"] == said["b"]
    assert said["b"][1] == [3.0, 3.0]
    assert events(steps).count("healed") == 1


def test_a_group_of_before_a_resume_heals_from_those_that_resumed_and_goes_back(lighthouse: str, steps: Path) -> None:
    """It was frozen, say, while the job was started again from an older checkpoint."""
    resumed, joined = threading.Event(), threading.Event()

    def resumes() -> Any:
        state, after = {"w": torch.full((2,), 1.0)}, {}
        with manager(lighthouse, "a", state) as m:
            m.load_state_dict({"step": 5, "batches_committed": 5, "lineage": 3})
            while not joined.is_set():
                if train(m, state):
                    after[m.current_step()] = held(m, state)
                    resumed.set()
            return after

    def zombie() -> Any:
        assert resumed.wait(30)
        state = {"w": torch.full((2,), 9.0)}
        with manager(lighthouse, "z", state) as m:
            m._context.progress.step, m._context.progress.lineage = 1_000_000, 3
            m._context.log_progress("loaded")
            while not train(m, state):
                pass
            joined.set()
            return held(m, state)

    after, (standing, weights) = together(resumes, zombie)
    assert after[standing["step"]] == (standing, weights)
    assert weights == [standing["step"] - 4.0] * 2
    assert events(steps).count("healed") == 1


def test_beside_groups_that_begin_a_diverged_one_counts_in_no_average(lighthouse: str) -> None:
    """It heals after the backward pass, the others before it: all have to count the same groups."""
    ready = threading.Barrier(3)

    def group(name: str) -> Any:
        state = {"w": torch.zeros(2)}
        with manager(lighthouse, name, state) as m:
            if name == "c":
                m.load_state_dict({"step": 5, "batches_committed": 5, "lineage": "diverged:x:0"})
            ready.wait(30)
            assert train(m, state)
            ready.wait(30)
            return held(m, state)

    a, b, c = together(*(lambda n=n: group(n) for n in "abc"))
    assert a == b == c
