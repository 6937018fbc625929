"""The durable checkpoints of a job, as the metrics service learns of them from several groups."""

from __future__ import annotations

from keepstep_mesh.protocol.telemetry_records import read_batch
from keepstep_metrics.history.durable import DurableProgress
from keepstep_metrics.history.findings.alerts import alerts
from keepstep_metrics.history.machine import MetricsCore
from tests.support.services.metrics_driver import Teller
from tests.unit.keepstep_metrics.history.job_driver import T, World, joined


def told(world: World, name: str, t: float, step: int, **more: object) -> None:
    teller = world.workers.setdefault(name, Teller(name))
    record = {"kind": "durable", "t": T + t, "step": step, "every": 10, **more}
    world.core.apply(read_batch(teller.batch(record)), T + t)


def durable(world: World) -> DurableProgress:
    assert world.job.durable is not None
    return world.job.durable


def test_the_newest_commit_counts_and_a_failure_that_several_groups_report_counts_once() -> None:
    world = joined("a:1", "b:1")
    assert world.job.durable is None
    told(world, "a:1", 20, 10, bytes=100, seconds=2.0)
    told(world, "b:1", 21, 10)
    for name in ("a:1", "b:1"):
        told(world, name, 30, 20, error="disk full")
    one = durable(world)
    assert (one.step, one.committed_at, one.bytes, one.seconds) == (10, T + 20, 100, 2.0)
    assert (one.failures, one.error, one.age_steps(25)) == (1, "disk full", 15)
    told(world, "a:1", 40, 30, bytes=110, seconds=3.0)
    told(world, "b:1", 41, 20, error="late report")
    assert (one.step, one.failures, one.error, one.age_steps(30)) == (30, 1, "", 0)


def test_a_job_that_went_back_has_the_checkpoint_that_it_went_back_to() -> None:
    world = joined("a:1")
    told(world, "a:1", 20, 50)
    world.happens(30, "went_back", to=40)
    told(world, "a:1", 31, 40)
    assert durable(world).age_steps(45) == 5
    told(world, "a:1", 40, 50)
    assert durable(world).step == 50


def test_a_checkpoint_that_a_job_resumed_from_is_as_old_as_its_commit() -> None:
    world = joined("a:1")
    told(world, "a:1", 20, 50, committed=T - 3000.0)
    assert (durable(world).step, durable(world).committed_at) == (50, T - 3000)
    told(world, "a:1", 30, 60, seconds=2.0)
    assert durable(world).committed_at == T + 30


def test_an_old_checkpoint_is_an_alert_with_the_last_error() -> None:
    world = joined("a:1")
    told(world, "a:1", 20, 10)
    world.steps("a:1", 20, 400)
    told(world, "a:1", 400, 390, error="no relay is registered")
    (found,) = (one for one in alerts(world.job, T + 400) if one.name == "CheckpointIsOld")
    assert found.sentence == "the newest durable checkpoint is 390 steps and 6 minutes old: no relay is registered"
    told(world, "a:1", 401, 400)
    assert not [one for one in alerts(world.job, T + 410) if one.name == "CheckpointIsOld"]


def test_a_damaged_checkpoint_that_several_groups_skipped_counts_once_and_is_an_alert() -> None:
    world = joined("a:1", "b:1")
    told(world, "a:1", 20, 10, committed=T + 1)
    told(world, "a:1", 30, 5, skipped="step-10-1-a step-7-1-a")
    told(world, "b:1", 31, 5, skipped="step-10-1-a step-7-1-a")
    one = durable(world)
    assert (one.skips, one.skipped_at) == (2, T + 30)
    (found,) = (one for one in alerts(world.job, T + 40) if one.name == "CheckpointWasSkipped")
    assert found.sentence.endswith("older durable checkpoint; damaged: step-10-1-a, step-7-1-a")
    assert not [one for one in alerts(world.job, T + 700) if one.name == "CheckpointWasSkipped"]


def test_it_survives_a_restart_of_the_service_also_from_a_dump_without_it() -> None:
    world = joined("a:1")
    told(world, "a:1", 20, 10, bytes=100)
    again = MetricsCore()
    again.load(world.core.dump())
    assert again.jobs["job"].durable == durable(world)
    dumped = world.core.dump()
    del dumped["jobs"][0]["durable"]
    older = MetricsCore()
    older.load(dumped)
    assert older.jobs["job"].durable is None
