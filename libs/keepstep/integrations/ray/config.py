"""The configuration of a run of Ray Train whose workers are the ranks of replica groups of keepstep."""

from __future__ import annotations

import inspect
import os
import secrets
from collections.abc import Mapping
from typing import Any

from keepstep.coordination import LighthouseServer
from keepstep.integrations.ray.function_context import GroupContext
from keepstep.integrations.ray.ray_classes import Backend, Config, WorkerGroup, ray
from keepstep.integrations.ray.replica_groups import ReplicaGroups
from keepstep_mesh.config.settings import split_addresses
from keepstep_mesh.security.tokens import Tokens


class KeepstepConfig(Config):  # type: ignore[misc]
    """Ray's ``TorchftConfig`` with a lighthouse of keepstep. Each ``ranks`` workers are a replica group.

    Without ``lighthouse`` the run has a lighthouse of its own, in the process of Ray Train's controller. It listens at
    the address of that node in the cluster, and lets only workers with the token in. ``KEEPSTEP_ADMIN_TOKEN`` and
    ``KEEPSTEP_SERVICE_TOKEN`` of this process are its tokens for operators and services.

    Args:
        ranks: number of workers of a group. More than one need the ``TorchTrainer`` of this room.
        lighthouse: ``http://host:port`` of a lighthouse that runs already; several separated by commas.
        token: of the workers, at least 16 characters. Default: ``KEEPSTEP_TOKEN`` of this process. Without it a
            lighthouse of the run's own gets a random one, and with ``lighthouse`` each node uses its own
            ``KEEPSTEP_TOKEN`` or ``KEEPSTEP_TOKEN_FILE``.
        job: name of the job. Default: ``KEEPSTEP_JOB`` of this process, else the name of the run (``RunConfig.name``).
        lighthouse_kwargs: of ``LighthouseServer``, such as ``min_replicas`` (default: 1), or ``bind`` for another
            address. Not with ``lighthouse``.
        spares: number of groups that stand by as spares; the others train.
        **kwargs: of Ray's ``TorchConfig``, such as ``backend``.

    Raises:
        ValueError: ``lighthouse`` is no address, or comes with ``lighthouse_kwargs``; ``spares`` is negative, or
            ``ranks`` below 1.
        TypeError: ``lighthouse_kwargs`` has a name that ``LighthouseServer`` has not.
        AuthError: a token is too short, or two roles have the same one.
    """

    def __init__(
        self,
        lighthouse: str | None = None,
        *,
        ranks: int = 1,
        token: str | None = None,
        job: str | None = None,
        lighthouse_kwargs: Mapping[str, Any] | None = None,
        spares: int = 0,
        **kwargs: Any,
    ) -> None:
        if lighthouse and lighthouse_kwargs:
            raise ValueError(
                f"lighthouse={lighthouse!r} runs already, and lighthouse_kwargs are those of a lighthouse that the "
                f"run starts: give one of them; `keepstep policy` changes limits of a job"
            )
        if spares < 0:
            raise ValueError(f"spares={spares}: pass the number of groups that stand by, 0 or more")
        if ranks < 1:
            raise ValueError(f"ranks={ranks}: pass the number of workers of a replica group, 1 or more")
        super().__init__(lighthouse_kwargs={"min_replicas": 1, **(lighthouse_kwargs or {})}, **kwargs)
        inspect.signature(LighthouseServer).bind(**{"bind": "", **self.lighthouse_kwargs})
        self.ranks = ranks
        self.lighthouse = ",".join(split_addresses(lighthouse)) if lighthouse else None
        self.job = job or os.environ.get("KEEPSTEP_JOB")
        token = token or os.environ.get("KEEPSTEP_TOKEN") or (None if lighthouse else secrets.token_hex(32))
        others = {} if lighthouse else os.environ
        admin, service = (others.get(f"KEEPSTEP_{role}_TOKEN") or None for role in ("ADMIN", "SERVICE"))
        Tokens(worker=token, service=service, admin=admin)  # an error in Ray's controller would be retried for ever
        self.worker_environment = {"KEEPSTEP_TOKEN": token} if token else {}
        if spares:
            self.worker_environment["KEEPSTEP_SPARES"] = str(spares)
        own = {"WORKER": None if lighthouse else token, "ADMIN": admin, "SERVICE": service}
        self.lighthouse_environment = {f"KEEPSTEP_{role}_TOKEN": one for role, one in own.items() if one}

    @property
    def backend_cls(self) -> type:
        """The class that prepares workers, for Ray Train."""
        return KeepstepBackend

    @property
    def train_func_context(self) -> type:
        """The context in which each worker runs the training function, for Ray Train."""
        return GroupContext


class KeepstepBackend(Backend):  # type: ignore[misc]
    """Starts the lighthouse, and tells each worker its group. Runs in Ray Train's controller, once in a process."""

    def __init__(self) -> None:
        super().__init__()
        self._lighthouse: LighthouseServer | None = None

    def _maybe_create_lighthouse_actor(self, backend_config: KeepstepConfig) -> str:
        """Return the address of the lighthouse, which Ray's class runs in an actor."""
        if backend_config.lighthouse:
            return backend_config.lighthouse
        if self._lighthouse is None:
            os.environ.update(backend_config.lighthouse_environment)
            host = ray.util.get_node_ip_address()
            bind = f"[{host}]:0" if ":" in host else f"{host}:0"
            try:
                self._lighthouse = LighthouseServer(**{"bind": bind, **backend_config.lighthouse_kwargs})
            except (OSError, RuntimeError, ValueError) as error:
                # max_failures limits the retries of this error; Ray retries any other one for ever
                raise ray.train.WorkerGroupError(f"the lighthouse of the run does not start: {error}", {}) from error
        return self._lighthouse.address()

    def on_start(self, worker_group: Any, backend_config: KeepstepConfig) -> None:
        """Start the lighthouse, and a process group of torch for the ranks of each group."""
        one_by_one = isinstance(worker_group, WorkerGroup) and not isinstance(worker_group, ReplicaGroups)
        if one_by_one and backend_config.ranks > 1:
            raise ray.train.WorkerGroupError(
                f"ray.train.torch.TorchTrainer has groups of one worker, not of ranks={backend_config.ranks}: use "
                f"keepstep.integrations.ray.TorchTrainer",
                {},
            )
        super().on_start(worker_group, backend_config)

    def on_training_start(self, worker_group: Any, backend_config: KeepstepConfig) -> None:
        """Set the environment of each worker, after Ray has set its own."""
        super().on_training_start(worker_group, backend_config)
        worker_group.execute(
            set_group_environment, backend_config.ranks, backend_config.job, backend_config.worker_environment
        )

    def on_shutdown(self, worker_group: Any, backend_config: KeepstepConfig) -> None:
        """End the process groups of torch, except those of a lost group, which would wait for its dead rank."""
        if isinstance(worker_group, WorkerGroup):
            super().on_shutdown(worker_group, backend_config)


def set_group_environment(ranks: int, job: str | None, variables: Mapping[str, str]) -> None:
    """Set what a ``Manager`` reads. Runs in the worker, after Ray has set ``TORCHFT_LIGHTHOUSE`` and the ranks.

    Args:
        ranks: number of ranks of a group.
        job: its name; None: the name of the run.
        variables: further ones, such as a token.
    """
    context = ray.train.get_context()
    group, rank = divmod(context.get_world_rank(), ranks)  # Ray numbers the workers of all groups
    os.environ.update(
        variables,
        KEEPSTEP_LIGHTHOUSE=os.environ["TORCHFT_LIGHTHOUSE"],
        KEEPSTEP_JOB=job or context.get_experiment_name(),
        REPLICA_GROUP_ID=str(group),
        NUM_REPLICA_GROUPS=str(context.get_world_size() // ranks),
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
    )
