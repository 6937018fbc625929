"""Whose state a group starts from and goes on with: the first step, late groups, states that broke."""

from __future__ import annotations

import json
import logging
import threading
import traceback
import urllib.request
from typing import Any

import pytest
import torch

from keepstep import HTTPTransport
from keepstep_lighthouse.quorum.probation import partings
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.exit_codes import EXIT_STATE_MISMATCH
from tests.services.manager.groups import SECOND, change_policy, manager, together


def test_at_the_first_step_all_groups_take_over_one_state_and_all_contribute(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, value: float) -> tuple[Any, ...]:
        state = {"weights": torch.full((4,), value)}
        with manager(lighthouse, name, state, min_replica_size=2) as m:
            ready.wait(30)
            m.start_quorum()
            before_forward = state["weights"].tolist()
            tensor = torch.full((1,), value)
            m.allreduce(tensor).wait()
            ready.wait(30)
            return before_forward, tensor.item(), m.should_commit(), m.state_dict()

    a, b = together(lambda: group("a", 1.0), lambda: group("b", 5.0))
    assert a == b
    assert a[0] in ([1.0] * 4, [5.0] * 4)
    assert (a[1], a[2]) == (3.0, True)
    assert a[3]["lineage"] >= 1


def test_without_init_sync_each_group_keeps_its_own_first_state(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, value: float) -> tuple[Any, ...]:
        state = {"weights": torch.full((1,), value)}
        with manager(lighthouse, name, state, init_sync=False, min_replica_size=2) as m:
            ready.wait(30)
            m.start_quorum()
            m.allreduce(torch.zeros(1)).wait()
            ready.wait(30)
            return m.should_commit(), state["weights"].item()

    assert together(lambda: group("a", 1.0), lambda: group("b", 5.0)) == [(True, 1.0), (True, 5.0)]


@pytest.mark.parametrize("over_pg", [False, True], ids=["http", "pg"])
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_a_late_group_heals_to_the_step_and_state_of_the_others(lighthouse, sync, over_pg):
    three_done, joined, end = threading.Event(), threading.Event(), threading.Barrier(2)

    def veteran() -> tuple[Any, ...]:
        state = {"weights": torch.full((2,), 7.0)}
        with manager(lighthouse, "a", state, use_async_quorum=not sync, heal_over_pg=over_pg) as m:
            for _ in range(3):
                m.start_quorum()
                assert m.should_commit()
            three_done.set()
            assert joined.wait(30)
            while m.current_step() < 200:
                m.start_quorum()
                gradient = torch.ones(1)
                m.allreduce(gradient).wait()
                committed, met = m.should_commit(), gradient.item()
                if committed and m.batches_committed() > m.current_step():
                    end.wait(30)
                    return m.current_step(), m.batches_committed(), met
            raise AssertionError("the joiner never took part")

    def joiner() -> tuple[Any, ...]:
        assert three_done.wait(30)
        state = {"weights": torch.zeros(2)}
        own = state["weights"]
        with manager(lighthouse, "b", state, use_async_quorum=not sync, heal_over_pg=over_pg) as m:
            joined.set()
            while not (m.current_step() and m.batches_committed() > m.current_step()):
                m.start_quorum()
                gradient = torch.ones(1)
                m.allreduce(gradient).wait()
                m.should_commit()
            end.wait(30)
            return m.current_step(), m.batches_committed(), own.tolist()

    a, b = together(veteran, joiner)
    assert a[:2] == b[:2]
    assert b[2] == [7.0, 7.0], "received into the tensors that were there"
    with urllib.request.urlopen(f"{lighthouse}/v1/jobs/default/events", timeout=30) as answer:
        healed = [one for one in json.load(answer)["events"] if one["kind"] == "healed"]
    (told,) = [one["detail"] for one in healed if one["replica_id"].startswith("b:")]
    assert told["source"].startswith("a:")
    assert (told["step"] >= 3, told["bytes"] > 0, told["via"]) == (True, True, "process group" if over_pg else "direct")


class SlowTransport(HTTPTransport[dict[str, Any]]):
    """Receives only when it is let."""

    may_go_on = threading.Event()

    def recv_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        assert self.may_go_on.wait(60)
        return super().recv_checkpoint(*args, **options)


def test_a_joiner_contributes_zeros_at_once_and_its_heal_holds_up_no_all_reduce(lighthouse):
    ahead, joined, healed = threading.Event(), threading.Event(), threading.Event()
    SlowTransport.may_go_on.clear()

    def veteran() -> tuple[Any, ...]:
        with manager(lighthouse, "a") as m:
            for _ in range(2):
                m.start_quorum()
                assert m.should_commit()
            ahead.set()
            assert joined.wait(30)
            m.start_quorum()
            tensor = torch.full((1,), 8.0)
            members = 0
            while not members:  # the quorum that takes the joiner in may be the next one
                worked = m.allreduce(tensor).wait()
                members = m.steps.current().plan.replica_world_size - 1
                if not members:
                    assert m.should_commit()
                    m.start_quorum()
            committed = m.should_commit()
            SlowTransport.may_go_on.set()
            assert healed.wait(30)
            return worked, tensor.item(), m.num_participants(), committed

    def joiner() -> tuple[Any, ...]:
        assert ahead.wait(30)
        transport = SlowTransport(timeout=30 * SECOND, num_chunks=0, hostname="127.0.0.1")
        with manager(lighthouse, "b", checkpoint_transport=transport) as m:
            joined.set()
            m.start_quorum(timeout=30 * SECOND)
            tensor = torch.full((1,), 99.0)
            worked = m.allreduce(tensor).wait()
            committed = m.should_commit()
            healed.set()
            return worked, tensor.item(), m.is_participating(), committed

    a, b = together(veteran, joiner)
    assert a == (True, 8.0, 1, True)
    assert b == (True, 8.0, False, True)


def test_while_the_state_may_not_be_read_no_healing_group_gets_it(lighthouse):
    """A quorum needs both groups, so the one that cannot heal is not parted."""
    needed, ready = threading.Barrier(2, lambda: change_policy(lighthouse, min_replicas=2)), threading.Barrier(2)

    def group(name: str) -> bool:
        with manager(lighthouse, name, {"w": torch.ones(1)}, min_replica_size=2, timeout=2 * SECOND) as m:
            m.disallow_state_dict_read()
            needed.wait(30)
            m.start_quorum()
            ready.wait(30)
            return m.should_commit()

    # the joiner fails, and a first step commits in all groups or in none
    assert together(lambda: group("a"), lambda: group("b")) == [False, False]


def test_a_group_that_took_part_although_behind_is_still_behind(lighthouse, steps):
    ready = threading.Barrier(2)

    def group(name: str, lineage: int) -> tuple[Any, ...]:
        weights = {"w": torch.full((1,), float(lineage))}
        with manager(lighthouse, name, weights) as m:
            m.load_state_dict({"step": 5, "batches_committed": 5, "lineage": lineage})
            ready.wait(30)
            m.start_quorum(allow_heal=False)
            m.allreduce(torch.zeros(1)).wait()
            first = m.should_commit()
            ready.wait(30)
            m.start_quorum()
            m.allreduce(torch.zeros(1)).wait()
            second = m.should_commit()
            ready.wait(30)
            return first, second, weights["w"].item()

    assert together(lambda: group("a", 1), lambda: group("b", 2)) == [(True, True, 2.0)] * 2
    (behind,) = [line for line in map(json.loads, steps.read_text().splitlines()) if line.get("behind")]
    assert (behind["replica_id"].partition(":")[0], behind["step"], behind["lineage"]) == ("a", 6, "loaded:1")
    assert behind["new_lineage"] == f"behind:{behind['replica_id']}:1"


def test_a_load_that_fails_leaves_no_state_that_others_could_heal_from(lighthouse, caplog):
    ready, done = threading.Barrier(2), threading.Event()

    def source() -> None:
        with manager(lighthouse, "a", {"w": torch.ones(1)}, min_replica_size=2) as m:
            m.load_state_dict({"step": 5, "batches_committed": 5, "lineage": 3})
            ready.wait(30)
            m.start_quorum()
            m.allreduce(torch.zeros(1)).wait()
            m.should_commit()
            assert done.wait(30)

    def joiner() -> tuple[Any, ...]:
        def does_not_fit(_: object) -> None:
            raise ValueError("does not fit")

        with manager(lighthouse, "b", min_replica_size=2) as m:
            m.set_state_dict_fns(does_not_fit, lambda: {"w": torch.zeros(1)})
            m.load_state_dict({"step": 4, "batches_committed": 4, "lineage": 2})
            ready.wait(30)
            m.start_quorum()
            m.allreduce(torch.zeros(1)).wait()
            committed = m.should_commit()
            done.set()
            return committed, m.current_step(), str(m._context.progress.lineage).startswith("torn:"), str(m.errored())

    caplog.set_level(logging.ERROR, "keepstep.manager")
    failed = "load_state_dict of 'default' failed: ValueError: does not fit"
    assert together(source, joiner)[1] == (False, 0, True, failed)
    (record,) = [one for one in caplog.records if "load_state_dict failed" in one.getMessage()]
    assert record.exc_info is not None
    assert "does_not_fit" in "".join(traceback.format_exception(record.exc_info[1])), "the user's own frame is shown"


def test_a_torn_group_that_nobody_can_heal_ends_and_hands_nothing_out(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, value: float) -> str:
        with manager(lighthouse, name, {"w": torch.full((2,), value)}, init_sync=False, min_replica_size=2) as m:
            m.mark_torn()
            ready.wait(30)
            m.start_quorum()
            m.allreduce(torch.ones(1)).wait()
            with pytest.raises((KeepstepError, RuntimeError)) as error:
                assert m.should_commit() is False
                raise KeepstepError(f"not healed: {m.errored()}")
            assert m.current_step() == 0
            return str(error.value)

    ended, waited = sorted(together(lambda: group("a", 1.0), lambda: group("b", 2.0)))
    assert "half written" in ended
    assert "not healed" in waited


def test_a_torn_group_takes_no_part_in_a_step_that_heals_nobody(lighthouse):
    with manager(lighthouse, "a") as m:
        m.mark_torn()
        with pytest.raises(KeepstepError, match="half written"):
            m.start_quorum(allow_heal=False)


class Unstorable:
    """No value that travels."""


def test_a_joiner_is_told_at_once_why_there_is_nothing_to_heal_from(lighthouse):
    ahead, joined, told = threading.Event(), threading.Event(), threading.Event()

    def veteran() -> str:
        with manager(lighthouse, "a", {"odd": Unstorable()}, timeout=120 * SECOND) as m:
            m.start_quorum()
            assert m.should_commit()
            ahead.set()
            assert joined.wait(30)
            while not told.is_set():
                m.start_quorum()
                assert m.should_commit()
            return "went on"

    def joiner() -> str:
        assert ahead.wait(30)
        with manager(lighthouse, "b", {"odd": Unstorable()}, timeout=120 * SECOND) as m:
            joined.set()
            m.start_quorum()
            assert not m.should_commit()
            told.set()
            return str(m.errored())

    went_on, reason = together(veteran, joiner)
    assert went_on == "went on"
    assert "state['user']['default']['odd']" in reason


def ahead_until(
    lighthouse: str, state: dict[str, Any], joined: threading.Event, ended: threading.Event, **options: Any
) -> None:
    """Train as a group that is ahead, from before the other joins until it has ended."""
    with manager(lighthouse, "a", state, **options) as m:
        m.load_state_dict({"step": 5, "batches_committed": 5, "lineage": 3})
        while not ended.is_set():
            m.start_quorum()
            m.allreduce(torch.ones(1)).wait()
            m.should_commit()
            joined.set()


@pytest.mark.parametrize(("cause", "sync"), [("keys", True), ("load", False), ("load", True), ("unstorable", False)])
def test_a_group_that_can_never_load_the_state_ends_with_a_code_of_its_own(lighthouse, capfd, monkeypatch, cause, sync):
    monkeypatch.setattr(partings, "PARTED_SECONDS", 0.1)  # of the lighthouse, a thread here: the joiner is kept out
    joined, ended = threading.Event(), threading.Event()
    tries = 0

    def joiner() -> SystemExit:
        def load(_: object) -> None:
            nonlocal tries
            tries += 1
            raise KeyError("ema")

        assert joined.wait(30)
        try:
            with (
                manager(lighthouse, "b", {"w": torch.zeros(1)}, use_async_quorum=not sync) as m,
                pytest.raises(SystemExit) as end,
            ):
                if cause == "keys":
                    m.register_state_dict_fn("ema", lambda _: None, dict)
                if cause == "load":
                    m.set_state_dict_fns(load, lambda: {"w": torch.zeros(1)})
                while True:
                    m.start_quorum()
                    m.allreduce(torch.ones(1)).wait()
                    assert not m.should_commit()
        finally:
            ended.set()
        return end.value

    state = {"odd": Unstorable()} if cause == "unstorable" else {"w": torch.ones(1)}
    ahead = lambda: ahead_until(lighthouse, state, joined, ended, use_async_quorum=not sync)  # noqa: E731
    _, end = together(ahead, joiner)
    assert end.code == EXIT_STATE_MISMATCH
    expected = {"keys": "register the same keys", "load": "KeyError: 'ema'", "unstorable": "cannot store"}[cause]
    assert expected in str(end)
    assert "(tried 3 times)" in str(end)
    assert cause != "load" or tries == 3
    printed = capfd.readouterr().err
    assert "keepstep: this group cannot load the state of the job: " in printed
    with urllib.request.urlopen(f"{lighthouse}/v1/jobs/default/events", timeout=30) as answer:
        (lost,) = [one for one in json.load(answer)["events"] if one["kind"] == "lost"]
    assert expected in lost["detail"]["reason"]
