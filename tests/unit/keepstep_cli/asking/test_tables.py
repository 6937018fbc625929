"""Tables fit a terminal of 80 columns, and break no text that a person copies."""

from __future__ import annotations

import time

import pytest

from keepstep_cli.asking import tables

UUID = "9a7c6573-1111-4222-8333-123456789abc"


def replica(name: str, **facts: object) -> dict[str, object]:
    return {
        "replica_id": f"{name}:{UUID}",
        "state": "training",
        "draining": False,
        "member": True,
        "step": 123_456,
        "world_size": 8,
        "heard_seconds_ago": 0.013,
        "step_seconds": 1.5,
        "last_commit_seconds_ago": 2.5,
        "healed_bytes": 43,
        "heal_bytes": 100,
        "reason": None,
        "name": name,
        "restarts": 3,
        "host": "node-17",
        "runtime": "python 3.11.7, torch 2.9.1",
        "address": "http://10.0.0.1:1",
        "last_error": "",
        "last_error_seconds_ago": None,
        **facts,
    }


def test_replicas_fit_80_columns_each_on_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "WIDE", 80)
    why = {"code": "duplicate_name", "numbers": {}, "sentence": f"r1:{UUID} waits: another has the same name"}
    gone = {"code": "gone", "numbers": {}, "sentence": "left: SIGTERM"}
    tables.show_replicas(
        [
            replica("train_0"),
            replica("r1", state="kept_out", reason=why, member=False),
            replica("r2", state="gone", reason=gone, member=False),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = [line.split() for line in lines if "13 ms ago" in line]
    assert [row[0] for row in rows] == ["train_0:9a7c6573", "r1:9a7c6573", "r2:9a7c6573"]
    assert rows[0][1:] == ["training", "43%", "123456", "1.5", "s", "13", "ms", "ago", "3", "node-17"]
    assert lines[-2:] == ["r1:9a7c6573 waits: another has the same name", "r2:9a7c6573: left: SIGTERM"]


def test_errors_and_different_versions_of_groups_are_lines_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    failed = "heal failed 14 times: no progress for 5 s"
    other = "python 3.12.1, torch 2.9.1"
    gone = replica("r2", state="gone", runtime="python 3.9")
    tables.show_replicas(
        [replica("r0", last_error=failed, last_error_seconds_ago=180), replica("r1", runtime=other), gone], wide=True
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == f"r0:9a7c6573: {failed} (3 min ago)"
    assert lines[-1].endswith(f"different results: r0: python 3.11.7, torch 2.9.1; r1: {other}")
    assert any("http://10.0.0.1:1" in line and "torch 2.9.1" in line for line in lines)
    why = {"code": "gone", "numbers": {}, "sentence": "failed at step 5: the script ended with KeyError"}
    tables.show_replicas([replica("r0", state="gone", reason=why, last_error="failed: the script ended with KeyError")])
    assert capsys.readouterr().out.count("KeyError") == 1
    tables.show_replicas([replica("r0"), gone])
    assert "different" not in capsys.readouterr().out


def test_a_drained_group_that_left_is_not_draining(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_replicas([replica("r0", state="gone", draining=True), replica("r1", draining=True)])
    out = capsys.readouterr().out
    assert "gone, drained" in out
    assert "training, draining" in out


def test_facts_about_a_group_have_units_and_labels_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_facts(replica("r0", last_error="heal failed: no route", last_error_seconds_ago=3.0))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    rows = dict(line.split("  ", 1) for line in lines if "  " in line)
    shown = {name: rows[name].strip() for name in ("heard", "step time", "healed", "member", "time of last error")}
    assert shown == {
        "heard": "13 ms ago",
        "step time": "1.5 s",
        "healed": "43 B",
        "member": "yes",
        "time of last error": "3 s ago",
    }


def test_a_service_has_its_details_in_units_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    details = {"memory_bytes": 4 << 30, "disk": True, "durable": False}
    relay = {"kind": "relay", "name": "vm-29520", "address": "http://127.0.0.1:29520", "details": details}
    tables.show_cluster({"nodes": [], "store": {"kind": "sqlite", "trouble": ""}, "services": [relay]})
    assert "relay vm-29520 http://127.0.0.1:29520  memory 4.0 GiB, disk, no durable\n" in capsys.readouterr().out


def quorum(code: str, **facts: object) -> dict[str, object]:
    reason = {"code": code, "numbers": {}, "sentence": ""}
    return {"members": ["r0", "r1"], "asking": ["r0"], "healthy": 2, "joiners": 0, "reason": reason, **facts}


def test_a_healthy_job_is_said_to_be_healthy() -> None:
    assert "healthy: all 2 groups train" in str(tables.healthy_sentence(quorum("fast")))
    assert "unless this stays" in str(tables.healthy_sentence(quorum("stragglers")))
    assert "the only group" in str(tables.healthy_sentence(quorum("fast", members=["r0"], healthy=1)))
    for other in (
        quorum("fast", joiners=1),
        quorum("fast", healthy=1),
        quorum("nobody", asking=[]),
        quorum("stragglers", asking=[]),
        quorum("min_replicas"),
        quorum("healing"),
        quorum("fast", members=[]),
    ):
        assert tables.healthy_sentence(other) is None


def test_bytes_and_seconds_of_an_event_have_units(capsys: pytest.CaptureFixture[str]) -> None:
    detail = {"step": 322, "bytes": 4198, "seconds": 0.02, "bytes_per_second": 2048}
    tables.show_event({"id": 1 << 32, "time": 0, "kind": "healed", "replica_id": "r1", "detail": detail})
    said = capsys.readouterr().out
    assert said.startswith("1.0  ")
    assert said.endswith("r1  step=322 bytes=4.1KiB seconds=20ms bytes_per_second=2.0KiB/s\n")


def test_a_reason_is_shown_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_event({"id": 1, "time": 0, "kind": "drain", "replica_id": "r0:1", "detail": {"reason": "[b] :bug:"}})
    assert capsys.readouterr().out.endswith("  r0:1  reason=[b] :bug:\n")


def test_jobs_fit_80_columns_and_say_why_they_do_not_train(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "WIDE", 80)
    policy = {"min_replicas": 2}

    def job(name: str, seconds: float, **state: object) -> dict[str, object]:
        told = {"since": time.time() - seconds, "step": 123_456, "why": "", **state}
        speed = {"steps_per_second": 12.3, "last_commit_seconds_ago": 0.08}
        return {"job": name, "state": told, "quorum_id": 7, "healthy": 3, "policy": policy, "bans": [], **speed}

    lost = f"r1:{UUID} was lost: it was silent for 5 s"
    tables.show_jobs(
        [
            job("a", 90, code="running") | {"joins": "heals: the script has 2 optimizers"},
            job("b", 7300, code="finished"),
            job("c", 200000, code="failed", why=lost),
        ],
        None,
    )
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = [line.split() for line in lines if "123456" in line]
    assert rows[0][-7:] == ["123456", "12", "80", "ms", "ago", "3", "2"]
    assert [" ".join(row[:-7]) for row in rows] == ["a running 90 s", "b finished 2 h 2 min", "c failed 2 d 8 h"]
    assert lines[-2:] == [
        "a: a group that joins heals: the script has 2 optimizers",
        "c: r1:9a7c6573 was lost: it was silent for 5 s",
    ]


SHARDS = {
    "world": 3,
    "seat": 1,
    "ranks": 4,
    "former_ranks": 4,
    "how": "replaced",
    "step": 7,
    "seconds": 0.25,
    "copies_bytes": 4 << 20,
    "keepers": ["r2:1"],
    "went_back": 0,
    "formed": False,
    "exposed": [{"keeper": "r2:1", "reason": "no memory"}],
}
EXPOSED = "r1 is exposed: its keeper r2:1 has no copies: no memory"


def test_members_of_a_job_with_one_copy_show_their_seat_and_keepers(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_replicas([replica("r0"), replica("r1", shards=SHARDS)])
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "r1:" in line and "node-17" in line)
    assert row.split()[-5:] == ["node-17", "1", "r2:1!", "4.0", "MiB"]
    assert "r1:9a7c6573: exposed: its keeper r2:1 has no copies: no memory" in out
    tables.show_replicas([replica("r0")])
    assert "keepers" not in capsys.readouterr().out


def test_facts_of_a_member_have_those_of_its_shards(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_facts(replica("r1", shards=SHARDS))
    out = " ".join(capsys.readouterr().out.split())
    for said in (
        "shards: how replaced",
        "shards: exposed r2:1 (no memory)",
        "shards: seconds 250 ms",
        "shards: seat 1",
    ):
        assert said in out


def test_explain_and_status_name_exposed_members(capsys: pytest.CaptureFixture[str]) -> None:
    shown = quorum("fast", exposed=[EXPOSED], copies_bytes=4 << 20)
    tables.show_quorum({"job": "j", "quorum_id": 1, "epoch": 1, "age_seconds": 1.0, "step": 7, **shown}, explain=True)
    out = capsys.readouterr().out
    assert EXPOSED in out
    assert "copies of shards in the memory of the members: 4.0 MiB" in out
