"""The features of one job, from the bottom up: each gets the features below that it uses. Pure.

A feature with a state of its own is a class. Others are functions on ``JobState``: ``heals``, ``retries``,
``stragglers``, ``finishing.starts``, ``forming.membership``, ``verification.divergence``.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum.agreement.agreements import Agreements
from keepstep_lighthouse.quorum.agreement.step_reports import StepReports
from keepstep_lighthouse.quorum.finishing.finishing import Finishing
from keepstep_lighthouse.quorum.forming.announcing import Announcer
from keepstep_lighthouse.quorum.hangs.hangs import Hangs
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.orders import Orders
from keepstep_lighthouse.quorum.presence.arrivals import Arrivals
from keepstep_lighthouse.quorum.presence.departures import Departures
from keepstep_lighthouse.quorum.presence.health import Health
from keepstep_lighthouse.quorum.presence.ports import Ports
from keepstep_lighthouse.quorum.probation.probation import Probation
from keepstep_lighthouse.quorum.shards import Shards
from keepstep_lighthouse.quorum.spares import Spares
from keepstep_lighthouse.quorum.takeover import Takeover
from keepstep_lighthouse.quorum.verification.verification import Verification


class Features:
    def __init__(self, record: JobRecord, now: float, now_unix: float) -> None:
        job = self.job = JobState(record, now_unix)
        self.takeover = takeover = Takeover(job, now)
        self.shards = shards = Shards(job)
        self.announcer = Announcer(job)
        self.probation = probation = Probation(job, shards)
        self.verification = verification = Verification(job)
        self.agreements = Agreements(job)
        self.reports = StepReports(job, self.agreements)
        self.departures = departures = Departures(job, takeover, probation, self.reports)
        self.health = Health(job, takeover, departures, now)
        self.ports = Ports(job, takeover, departures)
        self.arrivals = Arrivals(job, takeover, probation, departures, self.ports)
        self.hangs = Hangs(job, departures)
        self.orders = Orders(job, takeover, probation, departures, self.health)
        self.finishing = Finishing(job, probation, verification, departures)
        self.spares = Spares(job, takeover, probation, departures, self.finishing)

    def validate(self) -> None:
        """Raise AssertionError with a sentence when an invariant is violated."""
        self.job.validate()
        self.takeover.validate()
        self.probation.validate()
        self.orders.validate()
