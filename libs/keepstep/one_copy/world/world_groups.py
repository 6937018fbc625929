"""The process groups of a world: one of all ranks, and one for each dimension of the mesh.

The objects stay for the life of the process, so that modules, meshes and DTensors which know them outlive a change of
members; only their members change.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store, Work

from keepstep.one_copy.core.mesh_shape import MeshShape
from keepstep.process_group import ProcessGroupGloo
from keepstep.process_group.base import ProcessGroup
from keepstep.process_group.group_errors import ProcessGroupError
from keepstep.process_group.sequence import Task
from keepstep.process_group.torch_backends.nccl import group_class
from keepstep.process_group.works import CompletedWork
from keepstep.process_group.wrappers import ProcessGroupWrapper
from keepstep.runtime.devices import device_types
from keepstep.runtime.failed_future import noted_future

CONTROL, WORLD, LINES = 0, 1, 2
"""Numbers of the stores of ``configure``: for the control group, for all ranks, and from where those of lines begin."""
_numbers = count()


OUTSIDE = (
    "this collective ran outside of `with job.attempt()`, where a lost member is an error of the script: move what all "
    "ranks do together, such as a save, into the block, after commit()"
)


class OutsideWork(Work):
    """A collective outside of an attempt. Its error says what to do.

    Args:
        work: the collective.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        try:
            return self._work.wait(*args, **kwargs)
        except (ProcessGroupError, RuntimeError) as error:
            error.add_note(OUTSIDE)
            raise

    def get_future(self) -> Any:
        return noted_future(self._work.get_future(), OUTSIDE)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def synchronize(self) -> None:
        self._work.synchronize()


class MeshGroup(ProcessGroupWrapper):
    """Forwards to another group, unless it is muted.

    A member that replaces another builds its model while the others are elsewhere, so building must not communicate.

    Args:
        pg: the group to wrap.
        groups: all groups of the world.
    """

    def __init__(self, pg: ProcessGroup, groups: WorldGroups) -> None:
        super().__init__(pg)
        self._groups = groups

    def _run(self, operation: str, *args: Any) -> Work:
        if self._groups.begin():
            return CompletedWork(args[0] if args and not isinstance(args[0], (int, str)) else [])
        return self._told(lambda: super(MeshGroup, self)._run(operation, *args))

    def compose(self, task: Task, tensors: list[torch.Tensor]) -> Work:
        if self._groups.begin():
            return CompletedWork(tensors)
        return self._told(lambda: super(MeshGroup, self).compose(task, tensors))

    def _told(self, run: Callable[[], Work]) -> Work:
        """Run a collective. Outside of an attempt its error says what to do, also if the group has failed before."""
        if self._groups.in_attempt:
            return run()
        try:
            return OutsideWork(run())
        except (ProcessGroupError, RuntimeError) as error:
            error.add_note(OUTSIDE)
            raise


class WorldGroups:
    """Makes the group of all ranks torch's default group, and keeps a group for each dimension.

    Args:
        shape: of the mesh.
        device_type: ``"cpu"``, ``"cuda"`` or ``"xpu"``.
        timeout: limit of each collective.

    Raises:
        RuntimeError: torch.distributed is initialised already.
    """

    def __init__(self, shape: MeshShape, device_type: str, timeout: timedelta) -> None:
        if dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is initialised already: remove init_process_group, since a job with one copy "
                "initialises it with the ranks of all members"
            )
        self._shape = shape
        self._device_type = device_type
        self._muted = False
        self.launched: float | None = None
        """Monotonic seconds at which the last collective began; None: none did."""
        kind = group_class(device_type)
        self.control = ProcessGroupGloo(timeout=timeout)
        """Of all ranks, for votes; for tensors in main memory."""
        self.in_attempt = False
        """Whether a lost member ends the collectives of now without an error of the script."""
        self._world = MeshGroup(kind(timeout=timeout), self)
        self._lines = [MeshGroup(kind(timeout=timeout), self) for _ in shape.names]
        self._initialised = False
        self._rank, self._size = 0, 0

    def begin(self) -> bool:
        """Note that a collective begins. Return whether it is muted: it does nothing, and completes at once."""
        self.launched = time.monotonic()
        return self._muted

    @property
    def _all(self) -> list[ProcessGroup]:
        return [self.control, self._world, *self._lines]

    def configure(
        self, rank: int, size: int, quorum_id: int, store: Callable[[int], Store], *, host: str, name: str
    ) -> None:
        """Connect all groups with their members.

        Args:
            rank: of this process in the world.
            size: of the world, which the shape fits.
            quorum_id: of the quorum, for logs.
            store: returns an empty store, the same for all ranks that give one number.
            host: address of this machine that peers can reach.
            name: of this member, for logs.

        Raises:
            Exception: as ``ProcessGroup.configure``; then no group is usable.
        """
        lines = self._shape.lines(rank, size)
        members = [
            (self.control, CONTROL, tuple(range(size)), rank),
            (self._world, WORLD, tuple(range(size)), rank),
            *(
                (group, LINES + line.number, line.ranks, line.index)
                for group, line in zip(self._lines, lines, strict=True)
            ),
        ]
        for group, number, ranks, index in members:
            place = store(number)
            group.configure(f"{number}", name, index, len(ranks), quorum_id, 0, 1, list(ranks), store=place, host=host)
        if not self._initialised:
            self._register(rank, size)
        elif (rank, size) != (self._rank, self._size):
            forget_sharding()
        self._rank, self._size = rank, size
        known = dist.distributed_c10d._world.pg_group_ranks  # noqa: SLF001  torch has no public way to change members
        known[self._world] = {one: one for one in range(size)}
        for group, line in zip(self._lines, lines, strict=True):
            known[group] = {one: index for index, one in enumerate(line.ranks)}

    def _register(self, rank: int, size: int) -> None:
        devices = device_types()
        name = f"keepstep-world-{next(_numbers)}"
        dist.Backend.register_backend(name, lambda *_: self._world, devices=devices)
        dist.init_process_group(name, store=dist.HashStore(), rank=rank, world_size=size)
        for group, dimension in zip(self._lines, self._shape.names, strict=True):
            backend = f"keepstep-mesh-{next(_numbers)}-{dimension}"
            dist.Backend.register_backend(backend, lambda *_, group=group: group, devices=devices)
            dist.new_group([rank], backend=backend, group_desc=dimension, use_local_synchronization=True)
        self._initialised = True

    def mesh(self) -> DeviceMesh:
        """Return the mesh of all ranks. A mesh that was returned before stays valid while the size stays."""
        shape = self._shape.of(self._size)
        ranks = torch.arange(self._size).view(shape)
        return DeviceMesh.from_group(
            list(self._lines) if len(self._lines) > 1 else self._lines[0],
            self._device_type,
            mesh=ranks,
            mesh_dim_names=self._shape.names,
        )

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Let collectives of the mesh and of the default group do nothing."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def vote(self, values: list[int], timeout: timedelta) -> list[int]:
        """Return the smallest of each value over all ranks.

        Args:
            values: of this rank; of equal number in all ranks.
            timeout: limit.

        Raises:
            Exception: a rank is lost, or does not vote in time.
        """
        tensor = torch.tensor(values, dtype=torch.int64)
        self.control.allreduce(tensor, dist.ReduceOp.MIN, timeout).wait()
        return [int(one) for one in tensor.tolist()]

    def errored(self) -> Exception | None:
        """Return the first error of a group since ``configure``; None while all work."""
        return next((error for group in self._all if (error := group.errored()) is not None), None)

    def abort(self, reason: str) -> None:
        """End all collectives of all groups. From any thread."""
        for group in self._all:
            group.abort(reason)

    def shutdown(self) -> None:
        """Free all groups, and leave torch.distributed as it was before."""
        if self._initialised:
            dist.destroy_process_group()
            self._initialised = False
        for group in self._all:
            group.shutdown()


def forget_sharding() -> None:
    """Clear what DTensor remembers of earlier meshes.

    It looks results up by meshes that are equal, and meshes of one size are equal for all ranks. A rank that has
    another number than in an earlier world of this size would get the offsets of that number.
    """
    from torch.distributed.tensor import DTensor, debug  # noqa: PLC0415  loads slowly

    clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)  # torch has no public way
    if clear is None:  # torch 2.9
        propagator: Any = DTensor._op_dispatcher.sharding_propagator  # noqa: SLF001
        clear = propagator.propagate_op_sharding.cache.cache_clear
    clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            for one in list(vars(module).values()):
                if not isinstance(one, type) and callable(clear := getattr(one, "cache_clear", None)):
                    clear()
