"""Training of a model that exists only once: members hold shards, and other members keep copies of them."""

from __future__ import annotations

from keepstep.one_copy.job import OneCopy
from keepstep.one_copy.recovery.world_recovery import StateLost

__all__ = ["OneCopy", "StateLost"]
