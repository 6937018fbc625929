"""``TorchTrainer`` of Ray Train with replica groups of several ranks, which come and go while the others train."""

from __future__ import annotations

import threading
from typing import Any

from keepstep.integrations.ray.config import KeepstepConfig
from keepstep.integrations.ray.ray_classes import (
    Controller,
    Iteration,
    RaysTrainer,
    Running,
    get_env_vars_to_propagate,
    ray,
)
from keepstep.integrations.ray.replica_groups import ReplicaGroups

QUIET_VARIABLE = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"
"""Whether Ray warns about waits in the controller, which its own controller has too."""


class TorchTrainer(RaysTrainer):  # type: ignore[misc]
    """Ray Train's ``TorchTrainer`` for replica groups of ``KeepstepConfig(ranks=...)`` workers each.

    A group has a placement group of its own, with ``ScalingConfig(placement_strategy=...)``, and starts, ends, and
    starts again as a whole, while the others train. With ``ScalingConfig(num_workers=(min, max))`` groups come and go
    while the others train too.

    Args:
        train: the training function, or one with a dict of settings, as for Ray's class.
        torch_config: a ``KeepstepConfig``.
        scaling_config: of Ray Train. Its numbers of workers are multiples of ``torch_config.ranks``.
        **kwargs: of Ray's class, but no ``datasets``.

    Raises:
        ValueError: a number of workers is not a multiple of the ranks of a group, or ``datasets`` was given.
    """

    def __init__(self, train: Any, *, torch_config: KeepstepConfig, scaling_config: Any = None, **kwargs: Any) -> None:
        scaling_config = scaling_config or ray.train.ScalingConfig(num_workers=torch_config.ranks)
        for number in (scaling_config.min_workers, scaling_config.max_workers):
            if number % torch_config.ranks or not number:
                raise ValueError(
                    f"num_workers={scaling_config.num_workers} must be whole groups of ranks={torch_config.ranks} "
                    f"workers: use multiples of {torch_config.ranks}"
                )
        if kwargs.get("datasets"):
            raise ValueError(
                f"datasets={sorted(kwargs['datasets'])}: Ray divides them among the workers of one start, so a group "
                f"that starts again, or joins, would wait for its data for ever: read the data in train(), such as "
                f"ray.data.read_parquet(files[rank::ranks]), with rank = ray.train.get_context().get_world_rank() and "
                f"ranks = get_world_size()"
            )
        super().__init__(train, torch_config=torch_config, scaling_config=scaling_config, **kwargs)

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        """Run the controller in an actor on the node of this script, as Ray's class does with its own controller."""
        here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}  # noqa: SLF001  as Ray's class
        environment = {"env_vars": {QUIET_VARIABLE: "0", **get_env_vars_to_propagate()}}
        controller = ray.remote(num_cpus=0, label_selector=here, runtime_env=environment)(GroupController).remote(
            **arguments
        )
        if threading.current_thread() is threading.main_thread():
            self._register_sigint_handler(controller)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())


class GroupController(Controller):  # type: ignore[misc]
    """Ray Train's controller, which changes single groups. Ray's own starts all of them again at a change of size."""

    worker_group_cls = ReplicaGroups

    def _execute_resize_decision(self, decision: Any) -> Any:
        groups = self._worker_group
        if groups is None or not groups.survivors():
            return super()._execute_resize_decision(decision)
        failed = self._run_controller_hook("before_controller_execute_resize_decision", decision)
        if failed:
            return failed
        groups.resize(decision.num_workers // self._train_run_context.backend_config.ranks)
        return Iteration(run_attempt_id=self._get_run_attempt_id(), previous_state=self._state, next_state=Running())
