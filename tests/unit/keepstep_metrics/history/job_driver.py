"""A job as the metrics service learns of it."""

from __future__ import annotations

from keepstep_mesh.protocol.telemetry_records import read_batch
from keepstep_metrics.history.job import Job
from keepstep_metrics.history.machine import MetricsCore
from tests.support.services.metrics_driver import JOB, Teller, event, step

T = 1_700_000_000.0


class World:
    """A core and its senders; each record arrives ``late`` seconds after its event."""

    def __init__(self) -> None:
        self.core = MetricsCore()
        self.lighthouse = Teller()
        self.workers: dict[str, Teller] = {}

    def happens(self, t: float, kind: str, replica_id: str = "", **detail) -> None:
        self.core.apply(read_batch(self.lighthouse.batch(event(T + t, kind, replica_id, **detail))), T + t)

    def steps(self, replica_id: str, begin: float, end: float, seconds: float = 1.0, late: float = 0.0, **more) -> None:
        """Steps that follow each other without a gap from ``begin`` to ``end``."""
        worker = self.workers.setdefault(replica_id, Teller(replica_id))
        count = round((end - begin) / seconds)
        told = [step(T + begin + seconds * (one + 1), int(begin) + one + 1, seconds, **more) for one in range(count)]
        self.core.apply(read_batch(worker.batch(*told)), T + end + late)

    @property
    def job(self) -> Job:
        return self.core.jobs[JOB]

    def states(self, name: str, until: float) -> list[tuple[float, float, str]]:
        spans = self.job.groups[name].timeline.spans(T, T + until)
        return [(begin - T, end - T, state.value) for begin, end, state in spans]


def joined(*names: str) -> World:
    """Groups that came at 0, and are a quorum at 10."""
    world = World()
    for name in names:
        world.happens(0, "joined", name, member=False)
    world.happens(10, "quorum", quorum_id=1, members=list(names))
    return world
