"""The durable checkpoints of one job, as its groups report them. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from keepstep_mesh.protocol.telemetry_records import DurableRecord

MAX_SKIPPED = 100


@dataclass(slots=True)
class DurableProgress:
    """The newest committed checkpoint, the failures of writes, and damaged checkpoints."""

    committed_at: float
    """Unix time of the last commit; until the first one, of the first report."""
    step: int = 0
    """Of the newest committed checkpoint; 0: none."""
    every: int = 0
    """Steps between two checkpoints; 0: none is due by itself."""
    bytes: int = 0
    """Size of the state of one rank in the last committed one."""
    seconds: float = 0.0
    """From its staging copy to its commit."""
    failures: int = 0
    """Steps whose checkpoint was not written, as far as a group reported them."""
    failed_step: int = 0
    error: str = ""
    """Why the last one was not written; empty: it was."""
    skipped: list[str] = field(default_factory=list)
    """Ids of the last ``MAX_SKIPPED`` checkpoints that the job did not resume from, because they are damaged."""
    skips: int = 0
    """Number of all of them."""
    skipped_at: float = 0.0
    """Unix time of the last one; 0: none."""

    def add(self, record: DurableRecord) -> None:
        """Apply the report of one group. Several groups report each checkpoint."""
        self.every = record.every
        if new := [one for one in record.skipped.split() if one not in self.skipped]:
            self.skipped = [*self.skipped, *new][-MAX_SKIPPED:]
            self.skips += len(new)
            self.skipped_at = record.t
        if not record.error:
            if record.step >= self.step:
                self.error = ""
            if record.step > self.step:
                self.step, self.committed_at = record.step, record.committed or record.t
                self.seconds = record.seconds or self.seconds
                self.bytes = record.bytes or self.bytes
        elif record.step > max(self.step, self.failed_step):
            self.failed_step, self.error = record.step, record.error
            self.failures += 1

    def went_back(self, step: int) -> None:
        """Note that the job goes on from ``step``: later checkpoints are no longer those of its state."""
        self.step, self.failed_step = min(self.step, step), min(self.failed_step, step)

    def age_steps(self, step: int) -> int:
        """Return how many steps of a job at ``step`` a loss of all groups would cost."""
        return max(0, step - self.step)

    def dump(self) -> dict[str, Any]:
        return asdict(self)
