"""The figures of a step as scalars, for TensorBoard, W&B, and the like. Pure."""

from __future__ import annotations

from keepstep_mesh.protocol.telemetry_records import StepRecord

FIELDS = ("seconds", "quorum_seconds", "heal_seconds", "busy_seconds", "retry_seconds", "retries", "participants")
"""Fields of the record, under their names there."""
PREFIX = "keepstep/"


def scalars_of(record: StepRecord, discarded: int) -> dict[str, float]:
    """Return the figures of a committed step by name, and the values that the script recorded.

    Args:
        record: of the step.
        discarded: number of steps that were discarded since the last committed one.
    """
    figures = {PREFIX + name: float(value) for name in FIELDS if (value := getattr(record, name)) is not None}
    return {**figures, f"{PREFIX}discarded_steps": float(discarded), **record.values}
