"""Saving a state from any number of ranks, without a process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from keepstep.checkpoint.places.directory import DirectoryTarget
from keepstep.checkpoint.places.location import parse
from keepstep.checkpoint.places.target import CheckpointTarget, SaveFacts
from keepstep.checkpoint.planning import Plan, RankLayout, plan
from keepstep.checkpoint.rank_group import in_group, ranks
from keepstep.checkpoint.stored import stored_state
from keepstep.checkpoint.torch_calls import TorchParts, given, place_and_storage
from keepstep.checkpoint.torch_errors import errors_of_torch, join_torch
from keepstep.connection.deadline import Deadline
from keepstep.relay_client.relay_paths import AtRelay
from keepstep.state.flattening import expand, flatten
from keepstep.state.local_parts import ObjectPart, Part, TensorPart, local_parts
from keepstep.state.pack import Pack, Unread
from keepstep.state.pack_layout import describe
from keepstep.state.staged_parts import StagedParts
from keepstep.state.values.sharding import LocalShard
from keepstep.state.values.tensor_subclasses import refusal
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.manifest import chunk_digest
from keepstep_mesh.protocol.state_content import Sharding
from keepstep_mesh.threads.starting import Thread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint import SavePlanner, StorageWriter
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.staging import AsyncStager
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

Kind = Literal["durable", "live"]
TIMEOUT = timedelta(minutes=10)

log = get_logger("keepstep.checkpoint")


def save(
    state_dict: Mapping[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    step: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    kind: Kind = "durable",
    check_replicas: bool = False,
    sync: bool = True,
    overwrite: bool = False,
    timeout: timedelta = TIMEOUT,
    token: str | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata | None:
    """Save the state of all ranks as one checkpoint. Every rank calls it, with the part of the state that it holds.

    The ranks need no process group: they meet at the relay, or in the directory. A DTensor is saved in shards. Values
    that several ranks hold are saved once. Returns when the checkpoint is committed, and every rank knows: its
    directory may be renamed then. If one rank fails or is lost, every rank raises, no part of the checkpoint is
    visible, and earlier checkpoints are intact.

    The last five arguments are those of torch.distributed.checkpoint. With ``storage_writer`` or ``planner``, its own
    ``save`` runs, which plans with collectives, and keepstep is its storage unless ``storage_writer`` is given.

    Args:
        state_dict: nested dicts and lists. Objects with ``state_dict`` and ``load_state_dict``, such as modules and
            optimizers, are replaced by their state dicts.
        checkpoint_id: ``http://RELAY:29520/v1/jobs/JOB/checkpoints/ID``, a directory that all ranks see, or
            ``file:///DIRECTORY``. It must be new, unless ``overwrite`` is set.
        step: step of the training, for lists of checkpoints.
        rank: rank of this process. Default: that of torch.distributed if initialized, else ``RANK``, else 0.
        world_size: number of ranks that save. Default: likewise, ``WORLD_SIZE``, else 1.
        kind: ``"live"``: the relay may drop it when newer ones exist, and may have it in memory only.
        check_replicas: compare the values that are saved once. Ranks with different values are an error.
        sync: for a directory: return when the files are on disk. False: return when they are written, which takes less
            time. A checkpoint that a loss of power damages cannot be loaded then: the error names the file.
        overwrite: replace the checkpoint. It is whole until the new one is committed. Of two such saves at once, one
            raises, and with several ranks both may: let a save end before the next one. A relay with tokens wants an
            admin token for it.
        timeout: time limit.
        token: token for the relay. Default: that of the environment.
        storage_writer: storage of torch, instead of keepstep's. Its arguments count, not those above.
        planner: plans what each rank stores. ``check_replicas``, ``rank`` and ``world_size`` are not used then.
        process_group: save the ranks of this group only. It must have all shards of a tensor. Default: all ranks.
        no_dist: save this process alone.
        use_collectives: False: torch's ``save`` plans each rank alone.

    Returns:
        None; or what torch's ``save`` returns, if it ran.

    Raises:
        CheckpointAborted: a rank failed or was lost.
        CheckpointError: the checkpoint exists already, or the states of the ranks contradict each other.
        UnsupportedValue: the state has a value that cannot be stored; the error names its path.
        TransferTimeout: the time limit passed.

    Errors are also torch's ``CheckpointException``, if the process has imported it.
    """
    own_rank, ranks_in_all = ranks(rank, world_size, process_group, no_dist=no_dist)
    checkpoint_id, storage_writer = place_and_storage(checkpoint_id, storage_writer)
    with errors_of_torch(own_rank):
        of_torch = TorchParts(
            {"storage_writer": storage_writer, "planner": planner},
            {"process_group": process_group, "no_dist": no_dist, "use_collectives": use_collectives},
        )
        if of_torch:
            options: dict[str, Any] = {"step": step, "kind": kind, "sync": sync, "overwrite": overwrite}
            options |= {"timeout": timeout, "token": token}
            metadata: Metadata = of_torch.call("save", state_dict, checkpoint_id, "storage_writer", options)
            return metadata
        facts = save_facts(own_rank, ranks_in_all, step, kind, sync=sync, overwrite=overwrite)
        target = open_target(given(checkpoint_id, "storage_writer"), facts, timeout=timeout, token=token)
        _save(target, facts, lambda: in_group(_parts_of(state_dict), process_group), check_replicas)
    return None


def async_save(
    state_dict: Mapping[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    step: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    kind: Kind = "durable",
    check_replicas: bool = False,
    sync: bool = True,
    overwrite: bool = False,
    timeout: timedelta = TIMEOUT,
    token: str | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType | None = None,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[None]:
    """Copy the state, and save it in the background. Returns after the copy: the state may change then.

    Any number of saves may be in progress. Python waits for them at its end. The memory of the last copy is kept for
    the next one.

    Args:
        state_dict: see ``save``, as all other arguments. With one of the two below, ``storage_writer`` or ``planner``,
            torch's own ``async_save`` runs.
        async_checkpointer_type: whether a thread or a process of torch saves. Default: a thread of keepstep.
        async_stager: makes the copy.

    Returns:
        A future that is done when the checkpoint is committed. It raises what ``save`` raises. It cannot be cancelled.
        A stager of torch that copies in the background makes it torch's ``AsyncSaveResponse``.

    Raises:
        UnsupportedValue: the state has a tensor that cannot be stored.
    """
    own_rank, ranks_in_all = ranks(rank, world_size, process_group, no_dist=no_dist)
    checkpoint_id, storage_writer = place_and_storage(checkpoint_id, storage_writer)
    options: dict[str, Any] = {"step": step, "kind": kind, "sync": sync, "overwrite": overwrite}
    with errors_of_torch(own_rank):
        of_torch = TorchParts(
            {
                "storage_writer": storage_writer,
                "planner": planner,
                "async_checkpointer_type": async_checkpointer_type,
                "async_stager": async_stager,
            },
            {"process_group": process_group, "no_dist": no_dist, "use_collectives": use_collectives},
        )
        if of_torch:
            options |= {"timeout": timeout, "token": token}
            saving: Future[None] = of_torch.call("async_save", state_dict, checkpoint_id, "storage_writer", options)
            return saving
        facts = save_facts(own_rank, ranks_in_all, **options)
        target = open_target(given(checkpoint_id, "storage_writer"), facts, timeout=timeout, token=token)
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # a save cannot be cancelled
    problem: BaseException | None = None
    staged: StagedParts | None = None
    try:
        staged = StagedParts(in_group(_parts_of(state_dict), process_group))
    except BaseException as error:  # noqa: BLE001  raised below, also an interrupt; the thread tells the other ranks
        problem = error

    def parts() -> dict[str, Part]:
        if staged is None:
            assert problem is not None
            raise problem
        return staged.parts

    def run() -> None:
        failed: BaseException | None = None
        try:
            _save(target, facts, parts, check_replicas)
        except BaseException as error:  # noqa: BLE001  the future raises it
            log.warning("checkpoint not saved", checkpoint=str(checkpoint_id), reason=str(error))
            failed = error
            if isinstance(error, KeepstepError):
                join_torch(error, own_rank)
        if staged is not None:
            staged.release()  # before the future, so that the next save has the memory
        if failed is not None:
            future.set_exception(failed)
        else:
            future.set_result(None)

    if isinstance(problem, KeepstepError):
        join_torch(problem, own_rank)
    Thread(target=run, name="keepstep-async-save").start()
    if problem is not None:
        raise problem
    return future


def save_unread(
    state_dict: Mapping[str, Any],
    checkpoint_id: str | os.PathLike[str],
    unread: Unread,
    *,
    step: int = 0,
    timeout: timedelta = TIMEOUT,
    token: str | None = None,
) -> None:
    """Save a state whose tensors are read while they are written. This process is the only rank. See ``save``.

    Args:
        state_dict: nested dicts and lists.
        checkpoint_id: see ``save``.
        unread: tensors of the state that have no values yet. A save at a relay reads them twice: for their digests, and
            for their upload.
        step: see ``save``.
        timeout: see ``save``.
        token: see ``save``.
    """
    facts = save_facts(0, 1, step, "durable")
    target = open_target(checkpoint_id, facts, timeout=timeout, token=token)
    _save(target, facts, lambda: _parts_of(state_dict), False, unread)


# ---- one rank


def open_target(
    checkpoint_id: str | os.PathLike[str],
    facts: SaveFacts,
    *,
    timeout: timedelta = TIMEOUT,
    token: str | None = None,
) -> CheckpointTarget:
    """Return the place where this rank saves. The caller closes it.

    Args:
        checkpoint_id: see ``save``.
        facts: the save.
        timeout: time limit of the save.
        token: token for the relay. Default: that of the environment.
    """
    location = parse(checkpoint_id)
    deadline = Deadline(timeout.total_seconds(), f"{location} was not saved")
    if isinstance(location, AtRelay):
        from keepstep.checkpoint.places.at_relay import RelayTarget  # noqa: PLC0415  # a directory needs no HTTP

        return RelayTarget(location, facts, deadline, token)
    return DirectoryTarget(location.path, facts, deadline)


def save_facts(
    rank: int | None, world_size: int | None, step: int, kind: str, *, sync: bool = True, overwrite: bool = False
) -> SaveFacts:
    """Return the facts of a save. See ``save`` for the defaults."""
    return SaveFacts(*ranks(rank, world_size), step, kind, f"{socket.gethostname()}:{os.getpid()}", sync, overwrite)


def _save(
    target: CheckpointTarget,
    facts: SaveFacts,
    local: Callable[[], dict[str, Part]],
    check_replicas: bool,
    unread: Unread | None = None,
) -> None:
    try:
        target.begin()
        try:
            parts = local()
            _check_objects(parts)
            digests = {key: digest_of(part) for key, part in parts.items()} if check_replicas else {}
            layout = RankLayout.of(parts, digests)
            target.store(written(parts, facts.rank, _plan(target, facts, layout), unread))
            target.commit()
        except BaseException as error:
            target.fail(f"{type(error).__name__}: {error}")
            raise
    finally:
        target.close()


def _parts_of(state_dict: Mapping[str, Any]) -> dict[str, Part]:
    """Return what this rank holds of a state. Raises ``UnsupportedValue`` for a tensor that cannot be stored."""
    parts = local_parts(flatten(expand(state_dict).state))
    for key, part in parts.items():
        for _, tensor in part.pieces if isinstance(part, TensorPart) else ():
            if tensor.is_meta:
                raise refusal(tensor, key)
    return parts


def _check_objects(parts: Mapping[str, Part]) -> None:
    """Raise ``UnsupportedValue`` for a value that cannot be stored, also if another rank stores its own."""
    describe({key: part.value for key, part in parts.items() if isinstance(part, ObjectPart)})


def _plan(target: CheckpointTarget, facts: SaveFacts, layout: RankLayout) -> Plan:
    if facts.world_size == 1:
        return plan([layout], [0])
    exchanged = target.exchange(layout.pack())
    return plan([RankLayout.unpack(one) for one in exchanged.layouts], exchanged.of_rank)


def written(parts: Mapping[str, Part], rank: int, the_plan: Plan, unread: Unread | None = None) -> Pack:
    """Return the pack that ``rank`` writes of the parts that it holds."""
    mine = {key: one for key, part in parts.items() if (one := the_plan.writes(rank, key, part)) is not None}
    return pack_of(mine, unread)


def pack_of(parts: Mapping[str, Part], unread: Unread | None = None) -> Pack:
    """Return the pack with all of ``parts``. ``Pack`` has ``unread``.

    Raises:
        UnsupportedValue: a part cannot be stored; the error names its key.
    """
    tensors = {key: _stored(part) for key, part in parts.items() if isinstance(part, TensorPart) and part.pieces}
    objects = {key: part.value for key, part in parts.items() if isinstance(part, ObjectPart)}
    paths = {key: part.path for key, part in parts.items() if isinstance(part, ObjectPart) or _is_first(part)}
    return Pack(describe(stored_state(tensors, objects, paths)), unread)


def _is_first(part: TensorPart) -> bool:
    """Return whether the part has the first element of its tensor: its rank stores the path."""
    return any(not any(box.offset) or not box.volume for box, _ in part.pieces)


def _stored(part: TensorPart) -> Any:
    """Return the value that ``describe`` stores."""
    if not part.is_sharded:
        return part.pieces[0][1]
    shape, placements = (part.mesh.shape, part.mesh.placements) if part.mesh else ((), ())
    shards = [
        LocalShard(tensor, Sharding(part.shape, box.offset, shape, (), placements)) for box, tensor in part.pieces
    ]
    return shards[0] if len(shards) == 1 else shards


def digest_of(part: Part) -> bytes:
    """Return the digest of a value that other ranks may hold too; empty: none does."""
    if isinstance(part, TensorPart) and part.is_sharded and not (part.mesh and part.mesh.copied):
        return b""
    pack = pack_of({"": part})
    return chunk_digest(pack.content_bytes + pack.digests().digests)
