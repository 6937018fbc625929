"""Checks before a save and a load: sharding of all ranks, and keys. All are decisions without communication."""

from __future__ import annotations

from keepstep_megatron.validation.integrity import check_integrity, integrity_problems
from keepstep_megatron.validation.leaf_checks import (
    adjust_non_strict_load,
    check_leaves,
    maybe_report_missing_and_unexpected_keys,
    pack_leaves,
    unpack_leaves,
    validate_integrity_and_strict_load,
    validate_sharded_objects_handling,
)
from keepstep_megatron.validation.shard_rows import ShardRow, pack_rows, row_of, unpack_rows
from keepstep_megatron.validation.strict_handling import (
    KeyMismatch,
    StrictHandling,
    compare_keys,
    described,
    parse_strict_flag,
)

__all__ = [
    "KeyMismatch",
    "ShardRow",
    "StrictHandling",
    "adjust_non_strict_load",
    "check_integrity",
    "check_leaves",
    "compare_keys",
    "described",
    "integrity_problems",
    "maybe_report_missing_and_unexpected_keys",
    "pack_leaves",
    "pack_rows",
    "parse_strict_flag",
    "row_of",
    "unpack_leaves",
    "unpack_rows",
    "validate_integrity_and_strict_load",
    "validate_sharded_objects_handling",
]
