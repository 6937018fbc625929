"""Loading a checkpoint into the tensors of a state, whatever ranks and shards it was saved from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from keepstep.checkpoint.completing import complete
from keepstep.checkpoint.places.directory import DirectorySource
from keepstep.checkpoint.places.location import parse
from keepstep.checkpoint.reading import VerifiedReader, Wanted
from keepstep.checkpoint.stored import CheckpointReader, Piece, StoredCheckpoint, StoredTensor, pieces_of
from keepstep.checkpoint.torch_calls import TorchParts, given, place_and_storage
from keepstep.checkpoint.torch_errors import errors_of_torch
from keepstep.connection.deadline import Deadline
from keepstep.relay_client.relay_paths import AtRelay
from keepstep.state.errors import (
    MAX_NAMED,
    CheckpointDamaged,
    CheckpointError,
    MissingKeys,
    without_keys,
)
from keepstep.state.exact_load import put_back
from keepstep.state.flattening import Expanded, Leaf, expand, flatten, list_lengths, place
from keepstep.state.local_parts import Part, TensorPart, local_parts
from keepstep.state.pack_layout import may_overlap_itself
from keepstep.state.values.known_classes import class_name
from keepstep.state.values.sharding import is_dtensor, is_sharded_tensor, new_like
from keepstep.state.values.tensor_subclasses import is_whole_value, is_wrapper
from keepstep_mesh.protocol.boxes import Box
from keepstep_mesh.protocol.stored_keys import Path, key_of
from keepstep_mesh.text import listed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint import LoadPlanner, StorageReader

TIMEOUT = timedelta(minutes=10)


def load(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    strict: bool = True,
    timeout: timedelta = TIMEOUT,
    token: str | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load a checkpoint into ``state_dict``. Each rank calls it alone, with the part of the state that it wants.

    Tensors are loaded in place, and converted to the dtype of their destination, unless that would drop fractions or
    imaginary parts. A DTensor gets its shard, whatever shards were saved. Only the parts of chunks that have these
    bytes are read, and each is verified. Keys of the checkpoint that ``state_dict`` does not have are not loaded,
    except by optimizers and learning rate schedulers: they get all that was saved of them. An optimizer that has not
    stepped yet gets its state too, and one that was saved before its first step loses it. State that an optimizer has
    here keeps its dtype, which ``load_state_dict`` of torch would cast. After an error, tensors may be half loaded.

    The last four arguments are those of torch.distributed.checkpoint. With ``storage_reader`` or ``planner``, its own
    ``load`` runs, and keepstep is its storage unless ``storage_reader`` is given.

    Args:
        state_dict: as for ``save``. Tensors on the device "meta" get memory, except those of a module. Values that are
            not tensors are replaced. At the end, ``load_state_dict`` of its objects is called, in the order of their
            keys.
        checkpoint_id: see ``save``.
        strict: raise if the checkpoint does not have a key of ``state_dict``, or if a part of what it has would be left
            out: items of a longer list, states of parameters, imaginary parts. False: load what fits.
        timeout: time limit.
        token: token for the relay. Default: that of the environment.
        storage_reader: storage of torch, instead of keepstep's.
        planner: plans what each rank reads. Its ``allow_partial_load`` counts instead of ``strict``.
        process_group: that of torch's ``load``.
        no_dist: load this process alone, in torch's ``load``.

    Raises:
        CheckpointNotFound: the checkpoint does not exist, or is not committed.
        MissingKeys: the checkpoint does not have some keys.
        CheckpointDamaged: stored bytes are damaged; the error names the file and the key.
        CheckpointError: a tensor has another shape in the checkpoint, or a kind of dtype that does not fit; a list has
            more items there; an optimizer has other parameter groups; a class is not known in this process.
        TransferTimeout: the time limit passed.

    Errors are also torch's ``CheckpointException``, if the process has imported it.
    """
    checkpoint_id, storage_reader = place_and_storage(checkpoint_id, storage_reader)
    with errors_of_torch():
        of_torch = TorchParts(
            {"storage_reader": storage_reader, "planner": planner},
            {"process_group": process_group, "no_dist": no_dist},
        )
        if of_torch:
            options = {"timeout": timeout, "token": token}
            of_torch.call("load", state_dict, checkpoint_id, "storage_reader", options)
        else:
            _load(state_dict, open_reader(given(checkpoint_id, "storage_reader"), timeout=timeout, token=token), strict)


def _load(state_dict: dict[str, Any], reader: CheckpointReader, strict: bool) -> None:
    try:
        expanded, stored = expand(state_dict), StoredCheckpoint(reader)
        before = [dict(state) for _, _, state in expanded.stateful]
        _check_memory(expanded)
        for path, one, state in expanded.stateful:
            complete(one, state, path, stored)
        load_leaves(expanded.state, stored, strict=strict)
    finally:
        reader.close()
    for (_, one, state), own in zip(expanded.stateful, before, strict=True):
        one.load_state_dict(state)
        if isinstance(one, Optimizer):
            put_back(own, one.state_dict())
    try:
        _take_over(state_dict, expanded.state)
    except TypeError as error:
        raise CheckpointError(f"a mapping of the state cannot be changed ({error}): pass a dict instead") from error


def _check_memory(expanded: Expanded) -> None:
    """Raise if a module has parameters on the device "meta": its ``load_state_dict`` would load nothing into them."""
    for path, one, state in expanded.stateful:
        found = [key for key, value in state.items() if _is_meta(value)]
        if found and isinstance(one, torch.nn.Module):
            raise CheckpointError(
                f"{key_of((*path, found[0]))} has no memory (device meta): allocate the module first, with to_empty()"
            )


def open_reader(
    checkpoint_id: str | os.PathLike[str], *, timeout: timedelta = TIMEOUT, token: str | None = None
) -> CheckpointReader:
    """Return a reader of the bytes of a checkpoint. The caller closes it.

    Args:
        checkpoint_id: see ``save``.
        timeout: time limit of all reads together.
        token: token for the relay. Default: that of the environment.
    """
    location = parse(checkpoint_id)
    if isinstance(location, AtRelay):
        return reader_at_relay(location, Deadline(timeout.total_seconds(), f"{location} was not loaded"), token)
    return VerifiedReader(DirectorySource(location.path))


def reader_at_relay(location: AtRelay, deadline: Deadline, token: str | None) -> CheckpointReader:
    """Return a reader of a checkpoint that one or several relays have. The caller closes it."""
    from keepstep.checkpoint.places.at_relay import RelaySource  # noqa: PLC0415  # a directory needs no HTTP

    return VerifiedReader(RelaySource(location, deadline, token))


def _take_over(into: Any, loaded: Any) -> None:
    """Put the values of ``loaded``, which has the structure of ``into``, into the dicts of ``into``."""
    for key, value in loaded.items():
        here = into[key]
        if isinstance(here, Mapping):
            _take_over(here, value)
            if isinstance(into, MutableMapping):
                into[key] = here  # a subclass of dict may act on it
        elif not hasattr(here, "load_state_dict"):
            into[key] = value


def load_leaves(state: dict[Any, Any], stored: StoredCheckpoint, *, strict: bool) -> None:
    """Load into the leaves of a state without ``Stateful`` objects. See ``load``."""
    leaves = flatten(state)
    found = _present(leaves, stored, strict=strict)
    for key, leaf in found.items():
        if _is_meta(leaf.value):
            found[key] = Leaf(leaf.path, _allocated(leaf.value))
            place(state, leaf.path, found[key].value)
    parts = local_parts({key: leaf for key, leaf in found.items() if key in stored.tensors and _has_memory(leaf)})
    pieces = [
        (key, piece, target) for key, part in parts.items() for piece, target in _reads(key, part, stored, strict)
    ]
    read_pieces(stored.reader, pieces)
    for key, leaf in found.items():
        if key in stored.objects:
            into = leaf.value if isinstance(leaf.value, torch.Tensor) else None
            place(state, leaf.path, naming_key(key, lambda key=key, into=into: stored.value(key, into)))
        elif not _has_memory(leaf):
            place(state, leaf.path, naming_key(key, lambda key=key: stored.tensor(key)))


def _is_meta(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or is_sharded_tensor(value) or is_whole_value(value):
        return False
    return value.is_meta


def _allocated(value: Any) -> torch.Tensor:
    """Return memory for a tensor on the device "meta": on that of its mesh, or of the default process group."""
    if is_dtensor(value):
        return new_like(value)
    device, accelerator = torch.device("cpu"), torch.accelerator.current_accelerator()
    if accelerator is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        backends = torch.distributed.get_backend_config()
        device = device if "cpu:" in backends else accelerator
    return torch.empty_like(value, device=device, requires_grad=False)


def _present(leaves: Mapping[str, Leaf], stored: StoredCheckpoint, *, strict: bool) -> dict[str, Leaf]:
    """Return the leaves that the checkpoint has. Raises ``MissingKeys``, ``CheckpointError``."""
    available = stored.keys()
    missing = [key for key in leaves if key not in stored.tensors and key not in stored.objects]
    for key in list(missing):
        if isinstance(leaves[key].value, Mapping | list):  # an empty one, or a list of plain values
            below = [one for one in available if one.startswith(f"{key}.")]
            if below and isinstance(leaves[key].value, list):
                raise CheckpointError(
                    f"{key} is a list of {len(leaves[key].value)} plain values here, but the checkpoint has tensors or "
                    f"dicts in it ({listed(below, MAX_NAMED)}): pass a list like the one that was saved"
                )
            if below:
                raise CheckpointError(
                    f"{key} is empty here, but the checkpoint has {len(below)} values in it "
                    f"({listed(below, MAX_NAMED)}), which would not be loaded: create them first; of an "
                    f"optimizer, pass the optimizer itself"
                )
            if not isinstance(leaves[key].value, list):
                missing.remove(key)
    if strict:
        check_lengths(leaves.values(), stored)
        if missing:
            raise _missing(missing, stored)
    found = {key: leaf for key, leaf in leaves.items() if key in stored.tensors or key in stored.objects}
    for key, leaf in found.items():
        if isinstance(leaf.value, torch.Tensor) and key in stored.objects:
            _check_whole(key, leaf.value, stored)
        elif is_whole_value(leaf.value):
            raise CheckpointError(
                f"{key} is a {class_name(type(leaf.value))} here, but a {stored.tensors[key]} in the checkpoint: pass "
                f"a plain tensor, or None to get a new one"
            )
        if not isinstance(leaf.value, torch.Tensor) and key in stored.tensors and leaf.value is not None:
            raise CheckpointError(
                f"{key} is a {stored.tensors[key]} in the checkpoint, but a {type(leaf.value).__name__} here: pass a "
                f"tensor, or None to get a new one"
            )
    return found


def check_lengths(leaves: Iterable[Leaf], stored: StoredCheckpoint) -> None:
    """Raise ``CheckpointError`` if the checkpoint has more of a list, or of an optimizer's state, than ``leaves``."""
    known = list(leaves)
    there = list_lengths(stored.paths.values())
    for key, length in list_lengths(leaf.path for leaf in known).items():
        if there.get(key, 0) > length:
            raise CheckpointError(
                f"{key} has {length} items here, but {there[key]} in the checkpoint: pass a list of that length (the "
                f"rest would not be loaded)"
            )
    groups = [
        (key_of(leaf.path[:-3]), leaf.value)
        for leaf in known
        if leaf.path[-1:] == ("params",) and leaf.path[-3:-2] == ("param_groups",) and isinstance(leaf.value, list)
    ]
    if groups:
        states = _with_state(stored.paths.values())
        here = _with_state(leaf.path for leaf in known)
        for optimizer, parameters in groups:
            left_out = states.get(optimizer, set()) - here.get(optimizer, set())
            if named := [str(one) for one in parameters if str(one) in left_out]:
                raise CheckpointError(
                    f"{optimizer or 'the state'} has no state of parameters {listed(named, MAX_NAMED)} here, but the "
                    f"checkpoint has, which would not be loaded: pass the optimizer itself, or what get_state_dict "
                    f"returns"
                )


def _with_state(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Return the parameters that have a state, as text, by the key of the state dict of their optimizer."""
    found: dict[str, set[str]] = {}
    for path in paths:
        for at in (at for at, step in enumerate(path[:-1]) if step == "state"):
            found.setdefault(key_of(path[:at]), set()).add(key_of(path[at + 1 : at + 2]))
    return found


def check_cast(key: str, stored: torch.dtype, here: torch.dtype) -> None:
    """Raise ``CheckpointError`` if a conversion to the dtype of the destination would drop parts of the numbers."""
    if not torch.can_cast(stored, here):
        raise CheckpointError(
            f"{key} is {here} here, but {stored} in the checkpoint, and the conversion drops parts of its numbers: "
            f"pass a tensor of {stored}, or None to get a new one"
        )


def _has_memory(leaf: Leaf) -> bool:
    return isinstance(leaf.value, torch.Tensor) and not is_whole_value(leaf.value)


def _check_whole(key: str, value: torch.Tensor, stored: StoredCheckpoint) -> None:
    """Raise if a tensor is not of the class and the shape that the checkpoint has."""
    here = (class_name(type(value)), tuple(value.shape)) if is_wrapper(value) else None
    kind, *fields = node if type(node := stored.objects[key].node) is list and node else (None,)
    if kind == "quantized" and value.is_quantized:
        return
    there = (fields[0], tuple(fields[1])) if kind == "wrapped" else None
    if here is None or here != there:
        names = [f"a {one[0]} of shape {one[1]}" if one is not None else "another value" for one in (here, there)]
        what = names[0] if here is not None else f"a tensor of {value.dtype}"
        raise CheckpointError(f"{key} is {what} here, but {names[1]} in the checkpoint: pass such a value, or None")


def _missing(missing: list[str], stored: StoredCheckpoint) -> MissingKeys:
    available = stored.keys()
    return MissingKeys(without_keys(missing, available), tuple(missing), available)


def _reads(key: str, part: Part, stored: StoredCheckpoint, strict: bool) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield the pieces to read for a tensor, and the memory for each."""
    tensor = stored.tensors[key]
    assert isinstance(part, TensorPart)
    if part.shape != tensor.shape:
        raise CheckpointError(f"{key} has shape {part.shape} here, but is a {tensor} in the checkpoint")
    if strict:
        check_cast(key, tensor.dtype, part.dtype)
    for box, target in part.pieces:
        if may_overlap_itself(target):
            raise CheckpointError(
                f"{key} has elements here that share memory (strides {target.stride()}): pass a tensor without them, "
                f"such as its contiguous(), or None to get a new one"
            )
        covered = 0
        for shard, overlap in _overlaps(tensor, box):
            covered += overlap.volume
            for piece in pieces_of(shard, overlap):
                yield piece, target[overlap.within(box)]
        if covered != box.volume:
            raise CheckpointError(f"{key}: the checkpoint has {covered} of the {box.volume} elements of {box}")


def _overlaps(tensor: StoredTensor, box: Box) -> Iterator[tuple[Any, Box]]:
    for shard in tensor.shards:
        overlap = shard.box.overlap(box)
        if overlap is not None:
            yield shard, overlap


def read_pieces(reader: CheckpointReader, pieces: Sequence[tuple[str, Piece, torch.Tensor]]) -> None:
    """Read pieces into the memory of their tensors, each with its key for errors.

    A piece is received directly into its tensor, if the tensor has the bytes as they are stored, and no other piece has
    the same memory: it would change while its bytes are verified.
    """
    reader.read_all(
        [
            _wanted(key, piece, target, alone=alone)
            for (key, piece, target), alone in zip(pieces, _without_overlap(pieces), strict=True)
        ]
    )


def _wanted(key: str, piece: Piece, target: torch.Tensor, *, alone: bool) -> Wanted:
    where = (key, piece.shard.rank, piece.offset, piece.nbytes)
    memory = piece.memory_in(target) if alone else None
    if memory is None:
        return Wanted(*where, then=lambda data: piece.put(data, target))
    return Wanted(*where, memory, then=lambda _: _note_change(target))


def _note_change(target: torch.Tensor) -> None:
    """Let a backward pass fail that is in progress and needs the old values."""
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)


def _without_overlap(pieces: Sequence[tuple[str, Piece, torch.Tensor]]) -> list[bool]:
    """Return for each piece whether its memory is not that of another one too."""
    spans = []
    for number, (_, piece, target) in enumerate(pieces):
        part = target[piece.target]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        spans.append((part.data_ptr(), part.data_ptr() + extent * part.itemsize, number))
    spans.sort()
    found, reached = [True] * len(pieces), 0
    for at, (start, end, number) in enumerate(spans, 1):
        following = spans[at][0] if at < len(spans) else end
        found[number] = reached <= start and end <= following
        reached = max(reached, end)
    return found


def naming_key(key: str, read: Any) -> Any:
    """Return what ``read`` returns. Its error about damaged bytes gets the name of the key."""
    try:
        return read()
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{key} was not loaded: {error}") from error
