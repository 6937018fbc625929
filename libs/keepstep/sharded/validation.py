"""Public: the names of ``keepstep_megatron.validation``."""

from keepstep.sharded.refused import refusing
from keepstep_megatron.serialization import determine_global_metadata as determine_global_metadata  # noqa: PLC0414
from keepstep_megatron.serialization import validate_sharding_integrity as validate_sharding_integrity  # noqa: PLC0414
from keepstep_megatron.strategies.chosen import (
    verify_checkpoint_and_load_strategy as verify_checkpoint_and_load_strategy,  # noqa: PLC0414
)
from keepstep_megatron.validation import *  # noqa: F403

__getattr__ = refusing(
    __name__,
    dict.fromkeys(
        (
            *("_compute_shards_access", "_validate_common_state_dict", "_validate_objects_for_key"),
            "_validate_sharding_for_key",
        ),
        "validate_sharding_integrity checks leaves",
    )
    | dict.fromkeys(("_GlobalMetadata", "_LocalMetadata"), "determine_global_metadata returns lists of leaves")
    | {"_determine_missing_and_unexpected_keys": "validate_integrity_and_strict_load returns these keys"},
)
