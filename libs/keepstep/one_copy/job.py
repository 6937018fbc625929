"""A job whose model exists once: the face for training scripts."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import data

from keepstep.checkpoint.managed.durable_writer import LastCheckpoint
from keepstep.group.agreement import ARITHMETIC
from keepstep.group.group_link import LinkSettings
from keepstep.lifecycle.manager_settings import DurableSettings
from keepstep.one_copy.attempts import Attempts
from keepstep.one_copy.copies.copy_sender import CopySender
from keepstep.one_copy.copies.copy_server import CopyServer
from keepstep.one_copy.copies.frames import CopyError
from keepstep.one_copy.copies.keeper import Keeper
from keepstep.one_copy.core.mesh_shape import MeshShape, Share
from keepstep.one_copy.durable.shard_checkpoints import ShardCheckpoints
from keepstep.one_copy.member_link import MemberLink
from keepstep.one_copy.recovery.build_agreement import BuildAgreement
from keepstep.one_copy.recovery.current_quorum import CurrentQuorum
from keepstep.one_copy.recovery.world_recovery import WorldRecovery
from keepstep.one_copy.reporting.shard_reports import ShardReports
from keepstep.one_copy.reporting.step_reports import StepReports
from keepstep.one_copy.shard.built import Stateful
from keepstep.one_copy.shard.own_shard import OwnShard
from keepstep.one_copy.step_loader import StepLoader
from keepstep.one_copy.world.world_groups import WorldGroups
from keepstep.runtime import environment
from keepstep.runtime.devices import device_types
from keepstep.runtime.exits import script_error
from keepstep.runtime.host_memory import available_bytes, ranks_of_host
from keepstep_mesh.protocol.membership import SCRIPT, settings_text
from keepstep_mesh.threads.starting import reserve_for_exit

FREE_SHARE = 0.8
"""Part of the free memory of a host that copies may take."""


class OneCopy:
    """Trains a model that exists once: each rank of all members holds a shard.

    Each step is committed by all ranks together. Before that, each rank has sent what the step changes to the memory of
    a keeper, a rank on another host. A lost member costs a repeated step: a spare takes its place and reads its shard
    from its keeper, or the model is cut again for the ranks that are left.

    It initialises ``torch.distributed`` with the ranks of all members.

    Args:
        build: gets the ``DeviceMesh``, and returns the model and the optimizer of this rank, and perhaps schedulers and
            other objects with a ``state_dict``. It is called at the start and after a change of the number of ranks;
            collectives in it do nothing. Schedulers are stepped by ``commit``.
        init: gets the model when the job begins, and sets its first weights; None: those of ``build`` stay.
        mesh: size of each dimension of the mesh by name, one of them -1.
        device_type: ``"cuda"``, ``"xpu"`` or ``"cpu"``. Default: that of the accelerator, if this machine has one.
        data_dims: dimensions of the mesh over which ``share`` divides a batch. Default: all but ``tp``, ``cp`` and
            ``pp``.
        copies: number of keepers of each rank. With 2, two members may be lost together.
        memory: limit of the copies that this process keeps, in bytes; default: what is free.
        refuse_nonfinite: drop a step in which a rank has a NaN or an infinity in its gradients.
        timeout: limit of collectives and transfers.
        build_timeout: limit of ``build``, for which the other ranks wait. After it they try again.
        quorum_timeout: limit of a request for a quorum, after which it is asked again.
        connect_timeout: limit of the first connection.
        durable_every: number of steps between two durable checkpoints, each with the shards of all ranks; 0: none. If
            members are lost together with their keepers, the job goes on from the newest one. This and the next five
            arguments are those of ``Manager``, with the same environment variables.
        resume: whether a job that begins loads the newest durable checkpoint, and goes on from it after a loss.
            Default: with ``durable_every``.
        durable_relays: default: those that are registered with the lighthouse.
        durable_copies: number of relays that store each checkpoint.
        durable_newest_wins: replace a checkpoint that waits for an upload by a newer one, and do not wait.
        resume_wait: how long a resume waits for relays that do not answer.
        lighthouse_addr: default: ``KEEPSTEP_LIGHTHOUSE``.
        replica_id: name of this member. Default: as for ``Manager``.
        rank: rank within the member. Default: ``RANK``.
        world_size: number of ranks of the member. Default: ``WORLD_SIZE``.

    Raises:
        ValueError, TimeoutError, KeepstepError: as ``Manager``.
    """

    def __init__(
        self,
        build: Callable[[Any], Any],
        init: Callable[[nn.Module], object] | None = None,
        *,
        mesh: Mapping[str, int] | None = None,
        device_type: str | None = None,
        data_dims: Sequence[str] | None = None,
        copies: int = 1,
        memory: int | None = None,
        refuse_nonfinite: bool = False,
        timeout: timedelta = timedelta(seconds=60),
        build_timeout: timedelta = timedelta(minutes=30),
        quorum_timeout: timedelta = timedelta(seconds=60),
        connect_timeout: timedelta = timedelta(seconds=60),
        durable_every: int = 0,
        resume: bool | None = None,
        durable_relays: str | None = None,
        durable_copies: int = 1,
        durable_newest_wins: bool = False,
        resume_wait: timedelta = timedelta(seconds=30),
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if copies < 1:
            raise ValueError(f"copies={copies} must be at least 1; it is the number of keepers of each rank")
        # The first optimizer of a process imports it, which takes half a second: a spare has the time now, and not when
        # the others wait for its shard.
        importlib.import_module("torch._dynamo")
        self._shape = MeshShape(mesh or {"fsdp": -1})
        self._data_dims = self._shape.data_dims(data_dims)
        self._timeout = environment.seconds("TIMEOUT_SEC", timeout)
        device_type = device_type or device_types()[-1]
        self._settings = LinkSettings.from_arguments(
            lighthouse_addr=lighthouse_addr,
            replica_id=replica_id,
            rank=environment.from_launcher("RANK", rank, 0),
            world_size=environment.from_launcher("WORLD_SIZE", world_size, 1),
            store_addr=None,
            store_port=None,
            port=None,
            hostname=None,
            heartbeat_interval=0.1,
            connect_timeout=environment.seconds("CONNECT_TIMEOUT_SEC", connect_timeout).total_seconds(),
            quorum_retries=0,
        )
        durable = DurableSettings.from_arguments(
            durable_every=durable_every,
            resume=resume,
            durable_relays=durable_relays,
            durable_copies=durable_copies,
            durable_newest_wins=durable_newest_wins,
            resume_wait=resume_wait,
        )
        self._groups = WorldGroups(self._shape, device_type, self._timeout)
        common = {
            SCRIPT: "OneCopy",
            "arithmetic": ARITHMETIC,
            "mesh": ",".join(f"{name}={size}" for name, size in self._shape.sizes.items()),
            "data_dims": ",".join(self._data_dims),
            "device_type": device_type,
            "init": init is not None,
            "copies": copies,
            "ranks": self._settings.world_size,
            "refuse_nonfinite": refuse_nonfinite,
            "durable_every": durable.every,
            "resume": durable.resumes,
            "KEEPSTEP_SPARES": self._settings.spares,
        }
        self._shard = OwnShard()
        seconds = self._timeout.total_seconds()
        self._membership = MemberLink(self._settings, settings_text(common), device_type, seconds, self._groups)
        self._keeper = Keeper(self._optimizer, self._device, self._room(memory))
        self._server = CopyServer(self._settings.host, self._membership.token, self._keeper, seconds)
        self._sender = CopySender(self._membership.token, seconds, self._loss)
        self._reports = StepReports(self._membership)
        self._checkpoints = ShardCheckpoints(
            *(durable, self._membership, self._shard),
            written=self._reports.durable,
            found=self._reports.resumed,
            seconds=seconds,
        )
        self._shard_reports = ShardReports(
            self._membership.replica_id,
            self._settings.rank,
            self._membership.shards,
            exposed=lambda: self._sender.exposed,
            copies_bytes=lambda: self._keeper.nbytes,
            copies=copies,
        )
        self._agreement = BuildAgreement(member=self._membership, shard=self._shard, build_timeout=build_timeout)
        self._recovery = WorldRecovery(
            build=build,
            init=init,
            shape=self._shape,
            copies=copies,
            domain=environment.variable("DOMAIN") or socket.gethostname(),
            timeout=self._timeout,
            build_timeout=build_timeout,
            member=self._membership,
            groups=self._groups,
            server=self._server,
            keeper=self._keeper,
            sender=self._sender,
            shard=self._shard,
            checkpoints=self._checkpoints,
            agreement=self._agreement,
            ended=self._loss,
        )
        self._quorum = CurrentQuorum(
            shape=self._shape,
            copies=copies,
            quorum_timeout=environment.seconds("QUORUM_TIMEOUT_SEC", quorum_timeout),
            member=self._membership,
            groups=self._groups,
            shard=self._shard,
            checkpoints=self._checkpoints,
            reports=self._reports,
            shard_reports=self._shard_reports,
            recovery=self._recovery,
        )
        self._attempts = Attempts(
            refuse_nonfinite=refuse_nonfinite,
            timeout=self._timeout,
            member=self._membership,
            groups=self._groups,
            shard=self._shard,
            keeper=self._keeper,
            sender=self._sender,
            checkpoints=self._checkpoints,
            reports=self._reports,
            shard_reports=self._shard_reports,
            agreement=self._agreement,
            recovery=self._recovery,
            quorum=self._quorum,
        )
        self._membership.on_lost = self._quorum.ended
        self._pid, self._closed = os.getpid(), False
        atexit.register(self._exit)  # a script that fails, or just ends
        reserve_for_exit()

    def _loss(self) -> str:
        return self._quorum.loss()

    def _room(self, most: int | None) -> Callable[[], int]:
        def room() -> int:
            free = int(available_bytes() * FREE_SHARE) // ranks_of_host()
            return free if most is None else max(0, min(free, most - self._keeper.nbytes))

        return room

    def _optimizer(self, *args: Any, **kwargs: Any) -> Any:
        kind = self._shard.optimizer_class
        if kind is None:
            raise CopyError("this process has no optimizer yet")
        return kind(*args, **kwargs)

    def _device(self) -> torch.device:
        """Return that of the parameters: its type alone would be device 0 in a thread that rebuilds a shard."""
        return torch.device("cpu") if self._shard.held is None else self._shard.held.tensors.device

    # ---- facts

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self._shard.held.state.step if self._shard.held is not None else 0

    @property
    def rank(self) -> int:
        """Rank of this process among the ranks of all members."""
        return self._shard.now().rank

    @property
    def world_size(self) -> int:
        """Number of ranks of all members."""
        return self._shard.now().world.size

    @property
    def model(self) -> nn.Module:
        """The model of this rank. It changes with the number of ranks."""
        return self._shard.now().built.model

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks, as ``build`` gets it."""
        self._shard.now()
        return self._groups.mesh()

    @property
    def replica_id(self) -> str:
        """Name of this member."""
        return self._membership.replica_id

    @property
    def exposed(self) -> Mapping[str, str]:
        """Members that should keep copies of this rank and have none, and the reason."""
        return self._sender.exposed

    @property
    def copies_bytes(self) -> int:
        """Bytes of the copies of other ranks that this process keeps."""
        return self._keeper.nbytes

    @property
    def last_checkpoint(self) -> LastCheckpoint:
        """The newest durable checkpoint that this rank knows to be committed, and the error of the last write."""
        return self._checkpoints.last

    def share(self, samples: int) -> Share:
        """Return the part of a global batch on which this rank computes.

        The parts of all ranks make up the batch, for any number of ranks. Ranks that differ only in dimensions that are
        not in ``data_dims`` get the same part. Multiply the mean loss of the part by ``weight``: the mean of the
        gradients over the ranks is then that of all samples.

        Args:
            samples: number of samples in the global batch; at least one for each part.

        Raises:
            RuntimeError: the job has not begun.
            ValueError: fewer samples than parts.
        """
        held = self._shard.now()
        return self._shape.share(held.rank, held.world.size, samples, self._data_dims)

    def loader(
        self,
        dataset: data.Dataset[Any],
        global_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **kwargs: Any,
    ) -> StepLoader:
        """Return a loader whose ``batch()`` is that of this rank in this step.

        Each step takes the next ``global_batch_size`` samples, divided as ``share`` does. Which ones follows from
        ``step``, so that each sample of an epoch is in exactly one committed step, for any number of ranks.

        Args:
            dataset: with a length.
            global_batch_size: number of samples in a step of all ranks.
            shuffle: whether the order is random, another one in each epoch.
            seed: of the order; equal in all ranks. A step in which these values differ between ranks is dropped, and
                the members that differ end, as they do for other settings.
            drop_last: leave out the last batch of an epoch if it has fewer than ``global_batch_size`` samples.
            **kwargs: of ``torch.utils.data.DataLoader``, such as ``num_workers``.

        Raises:
            TypeError: an argument of DataLoader that divides the dataset into batches.
            ValueError: a number is out of range.
        """

        def part() -> tuple[int, int]:
            held = self._shard.now()
            return self._shape.part(held.rank, held.world.size, self._data_dims)

        return StepLoader(
            dataset,
            global_batch_size,
            step=lambda: self.step,
            part=part,
            used=self._agreement.loaders.append,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            **kwargs,
        )

    def register(self, name: str, state: Stateful) -> None:
        """Let ``state`` go with the model: a sampler, a scaler, what is equal in all ranks.

        A member that takes the place of another gets it from a rank that has committed the same step. Change it in the
        attempt, after ``commit``.

        Args:
            name: unique, and registered in all ranks before the first attempt: a member with other names ends.
            state: has ``state_dict`` and ``load_state_dict``.

        Raises:
            ValueError: another state has this name.
        """
        if name in self._shard.registered:
            raise ValueError(f"a state {name!r} is registered already; use another name")
        self._shard.registered[name] = state

    # ---- a step

    def attempt(self) -> contextlib.AbstractContextManager[tuple[Any, ...]]:
        """Try one step. Use it in a loop over ``step``, with ``commit`` at its end.

        If a member is lost, the block is left where the error occurred, without an error, and the next attempt takes
        the same step again. Without a ``commit`` the step is dropped. Let all ranks save
        together in the block too, after ``commit``: outside, a lost member is an error.

        If the other members have taken their last step already, this rank gets their state, and goes through the block
        once without effect: collectives of the mesh do nothing, ``commit`` returns False, and an error is not raised.

        Returns:
            A context with the objects that ``build`` returned.

        Raises:
            StateLost: members were lost together with their keepers.
            RuntimeError: the ranks have refused the step four times in a row.
        """
        return self._attempts.attempt()

    def commit(self, scaler: GradScaler | None = None) -> bool:
        """End the step: agree with all ranks, step the optimizer and the schedulers, and clear the gradients.

        Clip the gradients before. A step whose scaled gradients overflow in a rank is committed, and changes no weight.

        Args:
            scaler: has scaled the loss. It is stepped and updated here; ``unscale_`` may have been called. Return it
                from ``build``, or ``register`` it.

        Returns:
            Whether the step was committed. False: a rank has refused it, and the same step is tried again.

        Raises:
            Exception: a member was lost; the attempt handles it.
        """
        return self._attempts.commit(scaler)

    # ---- the end

    def finish(self) -> None:
        """End the training in all ranks together. Call it after the last step."""
        self._attempts.finish()
        self._membership.leave("finished", "finished", self.step)
        self.close()

    def _exit(self) -> None:
        """End with the process: the others hear why, and no native thread outlives the interpreter."""
        if os.getpid() == self._pid:
            self._membership.fail(script_error(0, at_exit=True))
            self.close()

    def close(self) -> None:
        """Free all connections, threads and memory, as ``finish`` and the end of the process do. Again: no effect."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._exit)
        self._sender.close()
        self._server.close()
        self._recovery.close()
        self._groups.shutdown()
        self._checkpoints.close()
        if self._attempts.faults is not None:
            self._attempts.faults.close()
        self._reports.close()
        self._membership.close()
