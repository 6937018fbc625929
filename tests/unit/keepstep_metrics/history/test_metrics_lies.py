"""Senders with false records or false clocks: the core refuses or accepts a batch, and goes on as before."""

from __future__ import annotations

import json
import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_mesh.protocol.telemetry_records import BadBatchError, read_batch
from keepstep_mesh.serving.openapi import plain
from keepstep_metrics.api import job_views, log_views, span_views
from keepstep_metrics.history.findings import straggler_view
from keepstep_metrics.history.job import MAX_GROUPS
from keepstep_metrics.history.machine import MetricsCore
from keepstep_metrics.history.work import whole
from keepstep_metrics.lighthouse.live_status import NOTHING
from tests.support.services.metrics_driver import JOB, Teller, event, step

T = 1_700_000_000.0
KINDS = ("joined", "lost", "failed", "left", "moved", "drain", "quorum", "heal_began", "healed", "heal_failed", "new")
DETAILS = (
    "quorum_id", "members", "step", "bytes", "bytes_per_second", "seconds", "source", "via", "reason", "member", "by",
)  # fmt: skip

numbers = st.one_of(st.floats(), st.integers(-(2**63), 2**64 - 1), st.sampled_from([2.0**63, 1e308, -1.0, 0]))
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20), st.binary(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.text(max_size=5), st.binary(max_size=5)), inner)
    ),
    max_leaves=8,
)
names = st.sampled_from(["a:1", "a:2", "b:1", "", ":", "c"])
times = st.one_of(st.floats(T - 200, T + 100), numbers)
details = st.dictionaries(st.one_of(st.sampled_from(DETAILS), st.binary(max_size=3)), anything, max_size=6)
events = st.builds(
    lambda t, kind, who, detail, extra: {**event(t, kind, who), "detail": detail, **extra},
    times, st.sampled_from(KINDS), names, details, st.dictionaries(st.sampled_from(["id", "epoch", "job"]), anything),
)  # fmt: skip
steps = st.builds(
    lambda t, number, more: {**step(T, 1), "t": t, "step": number, **more},
    times, numbers,
    st.dictionaries(
        st.sampled_from(["seconds", "quorum_seconds", "heal_seconds", "busy_seconds", "quorum_id", "values"]),
        st.one_of(numbers, st.dictionaries(st.text(max_size=3), numbers, max_size=20)),
    ),
)  # fmt: skip
others = st.one_of(
    st.builds(lambda t, state: {"kind": "state", "t": t, "state": state}, times, st.text(max_size=9)),
    st.builds(
        lambda t, done, total: {
            "kind": "transfer", "t": t, "job": JOB, "checkpoint": "c", "step": 1, "bytes": total, "bytes_done": done,
            "state": "uploading",
        },
        times, numbers, numbers,
    ),
)  # fmt: skip
batches = st.builds(
    lambda source, name, records, head: {
        "source": source, "name": name, "job": JOB, "boot": "x", "first": 1, "records": records, **head,
    },
    st.sampled_from(["worker", "lighthouse", "relay"]), st.sampled_from(["a:1", "b:1", "l"]),
    st.lists(st.one_of(events, steps, others, anything), max_size=4),
    st.dictionaries(st.sampled_from(["first", "dropped", "boot"]), st.one_of(numbers, st.text(max_size=3))),
)  # fmt: skip


@given(st.lists(batches, max_size=6))
def test_any_batch_is_refused_or_accepted_and_every_answer_is_json_that_a_browser_reads(told) -> None:
    core = MetricsCore()
    for number, one in enumerate(told):
        try:
            batch = read_batch(msgpack.packb(one))
        except BadBatchError:
            continue
        for _, made in core.apply(batch, T + number)[1]:
            json.dumps(made.detail)  # as the store writes it
    again = MetricsCore()
    again.load(msgpack.unpackb(msgpack.packb(core.dump()), strict_map_key=False))
    for job in again.jobs.values():
        found = whole(span_views.timeline(job, T - 300, T + 300, 100))
        for group in found.groups:
            assert sum(group.shares.values()) == pytest.approx(1)
        answers = (
            found,
            job_views.now_view(job, NOTHING, T),
            span_views.steps(job, T - 300, T + 300, 100, T + 300),
            whole(span_views.goodput(job, T - 300, T + 300)),
            straggler_view.stragglers_view(job),
            log_views.transfers(job, NOTHING),
            log_views.failures(job, 10),
            [*core.jobs[job.name].events],
        )
        for answer in answers:
            json.dumps(plain(answer), allow_nan=False)


@pytest.mark.parametrize("depth", [10, 400, 900, 100_000])
@pytest.mark.parametrize("where", [{"records": [event(T, "new", x="here")]}, {"name": "here"}, {"first": "here"}])
def test_a_deeply_nested_batch_is_refused(depth: int, where: dict) -> None:
    told = {"source": "lighthouse", "name": "l", "boot": "x", "first": 1, "records": []} | where
    body = msgpack.packb(told).replace(msgpack.packb("here"), b"\x91" * depth + b"\x90")
    with pytest.raises(BadBatchError):
        read_batch(body)


def test_nobody_speaks_for_another_job_or_in_the_name_of_another_kind_of_sender() -> None:
    core = MetricsCore()
    core.apply(read_batch(Teller("a:1").batch(event(T, "lost", "b:1", job="theirs"))), T)
    core.apply(read_batch(Teller().batch(step(T, 1))), T)
    assert not core.jobs


def test_a_step_with_more_values_than_are_kept_is_a_step_with_some_of_them() -> None:
    core = MetricsCore()
    values = {f"v{n}": 1.0 for n in range(100)}
    core.apply(read_batch(Teller("a:1").batch(step(T, 1, values=values))), T)
    assert [*core.jobs[JOB].values] == [f"v{n}" for n in range(16)]


def test_a_sender_whose_counts_are_absurd_does_not_end_the_snapshots() -> None:
    core = MetricsCore()
    for boot in range(4):
        told = {"source": "worker", "name": "a", "job": JOB, "boot": str(boot), "first": 1, "records": []}
        core.apply(read_batch(msgpack.packb(told | {"dropped": 2**63 - 1})), T)
    assert msgpack.unpackb(msgpack.packb(core.dump()))["dropped_total"] == 2**63 - 1


def test_records_that_find_no_room_are_counted() -> None:
    core = MetricsCore()
    core.apply(read_batch(Teller("a:1").batch(step(T + 1000, 1), step(T, 1))), T)
    assert (core.left_out, core.jobs[JOB].step) == (1, 1)
    for number in range(MAX_GROUPS + 1):
        core.apply(read_batch(Teller(f"g{number}:1").batch(step(T, 1))), T)
    assert (core.left_out, len(core.jobs[JOB].groups)) == (3, MAX_GROUPS)


def test_of_too_many_jobs_those_go_of_which_nothing_was_heard_for_long() -> None:
    core = MetricsCore()
    for number in range(100):
        core.apply(read_batch(Teller("a:1", f"j{number}").batch(step(T + number, 1))), T + number)
    core.apply(read_batch(Teller("a:1", "new").batch(step(T + 200, 1))), T + 200)
    assert "new" not in core.jobs
    core.apply(read_batch(Teller("a:1", "new").batch(step(T + 3601, 1))), T + 3601)
    assert set(core.jobs) == {f"j{number}" for number in range(1, 100)} | {"new"}


@pytest.mark.parametrize("ahead", [50.0, -50.0])
def test_a_clock_that_is_a_minute_off_hides_no_straggler(ahead: float) -> None:
    core, tellers = MetricsCore(), {name: Teller(f"{name}:1") for name in "abcd"}
    for second in range(60):
        for name, teller in tellers.items():
            t = T + second + (ahead if name == "a" else 0)
            told = step(t, second + 1, busy_seconds=0.9 if name == "c" else 0.4)
            core.apply(read_batch(teller.batch(told)), T + second)
    assert [one.name for one in straggler_view.stragglers_view(core.jobs[JOB]).groups if one.straggler] == ["c"]


def test_a_clock_of_the_service_that_steps_back_hides_no_straggler() -> None:
    core, tellers = MetricsCore(), {name: Teller(f"{name}:1") for name in "abcd"}
    for second in range(100):
        now = T + second - (3600 if second > 20 else 0)
        for name, teller in tellers.items():
            told = step(now, second + 1, busy_seconds=0.9 if name == "c" and second > 30 else 0.4)
            core.apply(read_batch(teller.batch(told)), now)
    assert [one.name for one in straggler_view.stragglers_view(core.jobs[JOB]).groups if one.straggler] == ["c"]


def test_numbers_that_json_has_not_are_null() -> None:
    assert plain({"a": [math.nan, math.inf, 1.5]}) == {"a": [None, None, 1.5]}
