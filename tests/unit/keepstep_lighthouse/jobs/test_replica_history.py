"""Facts about groups for operators: restarts, host, versions, last error; and the rate of steps."""

from __future__ import annotations

import pytest

from keepstep_lighthouse.jobs import replica_history
from keepstep_lighthouse.jobs.replica_history import ReplicaHistory, StepRate
from keepstep_lighthouse.quorum.events import LogEntry
from keepstep_lighthouse.quorum.views.replicas import ReplicaState, ReplicaView

PYTHON_11, PYTHON_12 = "python 3.11, torch 2.9", "python 3.12, torch 2.9"


def view(history: ReplicaHistory, name: str = "r0", now: float = 10.0) -> ReplicaView:
    return history.with_facts(ReplicaView(f"{name}:1", name, ReplicaState.TRAINING, member=True), now)


def test_each_new_incarnation_is_a_restart_and_a_reconnect_is_none() -> None:
    history = ReplicaHistory()
    for incarnation in ("r0:1", "r0:1", "r0:2", "r0:2", "r0:3"):
        history.arrived(incarnation, "node", PYTHON_11)
    assert (view(history).restarts, view(history).host, view(history).runtime) == (2, "node", PYTHON_11)
    assert view(history, "r9").restarts == 0


def test_failed_heals_are_counted_until_one_succeeds() -> None:
    history = ReplicaHistory()
    for second in range(14):
        history.add(LogEntry("heal_failed", "r0:1", {"reason": "no progress for 5 s"}), float(second))
    told = view(history, now=20.0)
    assert told.last_error == "heal failed 14 times: no progress for 5 s"
    assert told.last_error_seconds_ago == 7.0
    history.add(LogEntry("lost", "r0:1", {"reason": "it was silent for 5 s"}), 20.0)
    assert view(history).last_error == "lost: it was silent for 5 s"
    history.add(LogEntry("left", "r0:1", {"reason": "the script ended with KeyError", "cause": "failed"}), 20.5)
    history.add(LogEntry("left", "r0:1", {"reason": "shutdown", "cause": "finished"}), 20.6)
    assert view(history).last_error == "failed: the script ended with KeyError"
    history.add(LogEntry("healed", "r0:2", {}), 21.0)
    assert (view(history).last_error, view(history).last_error_seconds_ago) == ("", None)


def test_a_group_unlike_most_of_the_others_is_named_with_their_versions() -> None:
    history = ReplicaHistory()
    for name, runtime in {"a": PYTHON_11, "b": PYTHON_11, "c": PYTHON_12, "d": ""}.items():
        history.arrived(f"{name}:1", "node", runtime)
    connected = ["a", "b", "c", "d"]
    assert [history.unlike_others(f"{one}:1", connected) for one in connected] == ["", "", PYTHON_11, ""]
    assert history.unlike_others("c:1", ["c"]) == "", "the only group is like itself"


def test_groups_that_are_gone_do_not_count_among_the_others() -> None:
    history = ReplicaHistory()
    for name in ("old-1", "old-2", "old-3", "a"):
        history.arrived(f"{name}:1", "node", PYTHON_11)
    for name in ("b", "c"):
        history.arrived(f"{name}:1", "node", PYTHON_12)
    assert history.unlike_others("a:1", ["a", "b", "c"]) == PYTHON_12


def test_names_are_forgotten_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_history, "MAX_NAMES", 2)
    history = ReplicaHistory()
    for name in ("a", "b", "c"):
        history.arrived(f"{name}:1", name, "")
    assert [view(history, name).host for name in ("a", "b", "c")] == ["", "b", "c"]


def test_the_rate_is_measured_over_ten_seconds_or_twenty_steps() -> None:
    fast, slow = StepRate(), StepRate()
    for number in range(1, 2001):
        fast.add(1, number / 100)
    for number in range(1, 31):
        slow.add(1, number * 60.0)
    assert fast.per_second(20.0) == pytest.approx(100, rel=0.01)
    assert slow.per_second(1800.0) == pytest.approx(1 / 60)
    assert slow.per_second(1860.0) == pytest.approx(1 / 60), "the next step is not late"
    assert fast.per_second(26.0) == 0, "no commit for six seconds"
    assert StepRate().per_second(1.0) is None
