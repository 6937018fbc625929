"""Transformers and Accelerate on keepstep: ``KeepstepTrainer``, and ``prepare`` for loops with an ``Accelerator``.

Import it before ``TrainingArguments`` or an ``Accelerator`` is made: a launcher's variables tell Accelerate to connect
the processes of a job, and a group of one process has none. It takes LOCAL_RANK from the environment of such a group.
"""

import os

if int(os.environ.get("WORLD_SIZE", "1")) == 1:
    os.environ.pop("LOCAL_RANK", None)

from keepstep.integrations.transformers.accelerated import GroupOptimizer, prepare
from keepstep.integrations.transformers.group_trainer import KeepstepMixin, KeepstepTrainer

__all__ = ["GroupOptimizer", "KeepstepMixin", "KeepstepTrainer", "prepare"]
