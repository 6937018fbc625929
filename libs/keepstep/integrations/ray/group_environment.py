"""The environment of a worker of Ray Train that is a replica group of one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping

from keepstep.integrations.ray.ray_classes import ray


def set_group_environment(job: str | None, secrets: Mapping[str, str]) -> None:
    """Set what a ``Manager`` reads. Runs in the worker, after Ray has set ``TORCHFT_LIGHTHOUSE`` and the ranks.

    Args:
        job: its name; None: the name of the run.
        secrets: further variables.
    """
    context = ray.train.get_context()
    os.environ.update(
        secrets,
        KEEPSTEP_LIGHTHOUSE=os.environ["TORCHFT_LIGHTHOUSE"],
        KEEPSTEP_JOB=job or context.get_experiment_name(),
        REPLICA_GROUP_ID=str(context.get_world_rank()),
        NUM_REPLICA_GROUPS=str(context.get_world_size()),
        RANK="0",  # Ray's RANK and WORLD_SIZE are those of all workers
        WORLD_SIZE="1",
    )
