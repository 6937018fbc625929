"""LocalSGD and DiLoCo: groups train on their own for many steps, then average over the groups."""

from __future__ import annotations

from keepstep.local_sgd.decoupled import Decoupled
from keepstep.local_sgd.diloco import DiLoCo
from keepstep.local_sgd.local_tensors import extract_local_tensor
from keepstep.local_sgd.parameter_average import LocalSGD

__all__ = ["Decoupled", "DiLoCo", "LocalSGD", "extract_local_tensor"]
