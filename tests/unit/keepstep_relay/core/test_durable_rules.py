"""Decisions of a relay about durable checkpoints: which is the newest, and whose ranks fit together."""

from __future__ import annotations

import pytest

from keepstep_relay.core.events import (
    Begun,
    Cause,
    ChunkArrived,
    CommitAsked,
    Event,
    Facts,
    Key,
    Kind,
    Limits,
    RankReported,
    RefusedError,
    RootReported,
    Seal,
    Sealed,
    State,
    Table,
    TableArrived,
    Tick,
    Tier,
)
from keepstep_relay.core.invariants import check_invariants
from keepstep_relay.core.machine import RelayCore
from keepstep_relay.settings import read_settings

ROOT_A, ROOT_B = b"a" * 32, b"b" * 32
C1 = Key("job", "c1")


def send(core: RelayCore, *events: Event, at: float = 0.0) -> list[object]:
    decisions: list[object] = []
    for event in events:
        decisions += core.step(event, at)
        check_invariants(core)
    return decisions


def table(root: bytes, name: int) -> Table:
    return Table(root, 10, (bytes([name]) * 16,))


def commit(core: RelayCore, step: int, quorum_id: int, at: float) -> None:
    key = Key("job", f"step-{step}-q{quorum_id}")
    chunk = bytes([step]) * 15 + bytes([quorum_id])
    send(core, Begun(key, Facts(step, Kind.DURABLE, 1, quorum_id)), at=at)
    send(core, TableArrived(key, 0, Table(ROOT_A, 10, (chunk,))), ChunkArrived(chunk, Tier.DISK), at=at)
    send(core, CommitAsked(key), Sealed(key), at=at)


def test_a_job_that_went_back_keeps_its_new_checkpoints_and_drops_those_that_it_gave_up() -> None:
    core = RelayCore(Limits(keep_durable=2))
    for at, (step, quorum_id) in enumerate([(19, 5), (20, 5), (11, 6), (12, 6)]):
        commit(core, step, quorum_id, at=float(at))
    assert {key.id for key in core.checkpoints} == {"step-11-q6", "step-12-q6"}


def test_checkpoints_that_a_script_saves_by_itself_and_those_of_its_manager_do_not_replace_each_other() -> None:
    core = RelayCore(Limits(keep_durable=2))
    for at, (step, quorum_id) in enumerate([(19, 5), (20, 5), (30, 0), (21, 5), (31, 0), (32, 0)]):
        commit(core, step, quorum_id, at=float(at))
    assert {key.id for key in core.checkpoints} == {"step-20-q5", "step-21-q5", "step-31-q0", "step-32-q0"}


def test_the_last_good_checkpoint_stays_whatever_its_age_while_later_uploads_fail() -> None:
    core = RelayCore(Limits(keep_durable=1, durable_seconds=10.0, upload_seconds=5.0))
    commit(core, 1, 1, at=0.0)
    failed = Key("job", "step-2-q1")
    send(core, Begun(failed, Facts(2, Kind.DURABLE, 1, 1)), TableArrived(failed, 0, table(ROOT_A, 9)), at=1.0)
    send(core, Tick(), at=1000.0)
    assert {key.id for key in core.checkpoints} == {"step-1-q1"}
    assert core.ended[failed].state is State.ABORTED


def test_two_jobs_of_one_name_are_one_job_whose_names_cannot_be_used_twice() -> None:
    core = RelayCore(Limits(keep_durable=2))
    for at, (step, quorum_id) in enumerate([(10, 1), (90, 7), (11, 1)]):  # of job A, B, A
        commit(core, step, quorum_id, at=float(at))
    assert {key.id for key in core.checkpoints} == {"step-90-q7", "step-11-q1"}, "counted together"
    taken = Key("job", "step-11-q1")
    with pytest.raises(RefusedError, match=r"exists already with .*, not with .*: use another id") as refused:
        core.step(Begun(taken, Facts(11, Kind.DURABLE, 2, 1)), 9.0)
    assert refused.value.cause is Cause.CONFLICT
    with pytest.raises(RefusedError, match="another state"):
        core.step(TableArrived(taken, 0, table(ROOT_B, 9)), 9.0)


def begun(core: RelayCore) -> None:
    send(core, Begun(C1, Facts(1, Kind.DURABLE, 2, 1, one_producer=True)))


def arrive(core: RelayCore, rank: int, root: bytes) -> None:
    send(core, TableArrived(C1, rank, table(root, rank)), ChunkArrived(bytes([rank]) * 16, Tier.DISK))


def test_ranks_of_groups_with_different_states_are_never_committed_together() -> None:
    core = RelayCore(Limits(upload_seconds=60.0))
    begun(core)
    send(core, RootReported(C1, 0, "a", ROOT_A), RootReported(C1, 1, "b", ROOT_B))
    arrive(core, 0, ROOT_A)
    arrive(core, 1, ROOT_B)
    with pytest.raises(RefusedError, match="no producer has reported") as refused:
        core.step(CommitAsked(C1), 0.0)
    assert refused.value.cause is Cause.CONFLICT
    send(core, RootReported(C1, 1, "a", ROOT_A), RootReported(C1, 0, "b", ROOT_B))
    assert not send(core, RankReported(C1, 0), RankReported(C1, 1)), "each group differs from one of the ranks here"
    send(core, Tick(), at=61.0)
    assert core.ended[C1].state is State.ABORTED, "it does not stay open for ever"


def test_the_last_report_commits_when_one_group_has_all_ranks() -> None:
    core = RelayCore(Limits())
    begun(core)
    send(core, RootReported(C1, 0, "a", ROOT_A), RootReported(C1, 1, "b", ROOT_A))
    arrive(core, 0, ROOT_A)
    arrive(core, 1, ROOT_A)
    assert not send(core, RankReported(C1, 0), RankReported(C1, 1)), "no group has told both ranks yet"
    send(core, RootReported(C1, 1, "a", ROOT_A), RankReported(C1, 0))
    assert any(isinstance(one, Seal) for one in send(core, RankReported(C1, 1)))


def test_a_relay_that_only_has_memory_keeps_as_many_durable_checkpoints_as_it_was_told() -> None:
    assert read_settings({"memory_checkpoints": 2}, {}).limits.keep_durable == 2
    with_disk = read_settings({"memory_checkpoints": 2, "data_dir": "/tmp/x"}, {})
    assert with_disk.limits.keep_durable == 0, "the disk keeps them all, as without the flag"
    assert read_settings({"memory_checkpoints": 2, "keep_durable": 5}, {}).limits.keep_durable == 5
    with pytest.raises(ValueError, match="invalid memory_checkpoints -1"):
        read_settings({"memory_checkpoints": -1}, {})
