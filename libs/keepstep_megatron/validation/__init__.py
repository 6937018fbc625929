"""Checks before a save and a load: sharding of all ranks, and keys. All are decisions without communication."""

from __future__ import annotations

from keepstep_megatron.validation.integrity import check_integrity, integrity_problems
from keepstep_megatron.validation.shard_rows import ShardRow, pack_rows, row_of, unpack_rows
from keepstep_megatron.validation.strict_handling import (
    KeyMismatch,
    StrictHandling,
    compare_keys,
    parse_strict_flag,
)

__all__ = [
    "KeyMismatch",
    "ShardRow",
    "StrictHandling",
    "check_integrity",
    "compare_keys",
    "integrity_problems",
    "pack_rows",
    "parse_strict_flag",
    "row_of",
    "unpack_rows",
]
