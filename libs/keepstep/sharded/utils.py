"""Public: splitting of states, keys of leaves, and small helpers, under the names of Megatron Core."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from keepstep.sharded.refused import refusing
from keepstep.state.values.tensor_subclasses import is_whole_value
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import nested_values
from keepstep_megatron.distribution import shard_id as _sharded_tensor_shard_id  # noqa: F401
from keepstep_megatron.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from keepstep_megatron.prefixes import *  # noqa: F403


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Zip iterables of equal lengths.

    Args:
        args: the iterables.

    Raises:
        AssertionError: they have different lengths, as ``zip_strict`` of Megatron Core raises it.
    """
    lists = [list(one) for one in args]
    if len({len(one) for one in lists}) > 1:
        raise AssertionError(f"iterables of unequal lengths: {[len(one) for one in lists]}")
    return zip(*lists, strict=True)


def _sharded_object_id(sharded_object: ShardedObject) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return sharded_object.key, sharded_object.global_offset, sharded_object.global_shape


def force_all_tensors_to_non_fp8(sharded_state_dict: ShardedStateDict) -> None:
    """Check that no tensor wraps others, such as one of Transformer Engine.

    Args:
        sharded_state_dict: nested dicts and lists.

    Raises:
        CheckpointingException: a tensor does. Dequantize it first: keepstep does not use Transformer Engine.
    """
    for leaf in nested_values(sharded_state_dict):
        if isinstance(leaf, ShardedTensor) and leaf.data is not None and is_whole_value(leaf.data):
            raise CheckpointingException(f"{leaf.key!r} is a {type(leaf.data).__name__}: dequantize it first")


@contextmanager
def debug_time(
    name: str, logger: logging.Logger | None = None, threshold: float = float("-inf"), level: int | None = None
) -> Iterator[None]:
    """Log the time that a block takes.

    Args:
        name: of the block.
        logger: the logger. Default: that of this module.
        threshold: blocks of fewer seconds are not logged.
        level: of the log. Default: debug, or warning with a ``threshold``.
    """
    begin = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - begin
        if took >= threshold:
            chosen = level or (logging.DEBUG if threshold == float("-inf") else logging.WARNING)
            (logger or logging.getLogger(__name__)).log(chosen, "%s took %.4fs", name, took)


_LOGGING = "use the standard logging module; debug_time logs the time of a block"

__getattr__ = refusing(
    __name__,
    dict.fromkeys(("debug_msg", "fallback_logger", "logger_stack"), _LOGGING)
    | {
        "_ShardId": "a part is identified by its key, offset, and flattened range",
        "_clean_metadata_for_serialization": "pass content_metadata without process groups to save",
    },
)
