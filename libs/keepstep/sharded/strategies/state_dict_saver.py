"""Public: names of Megatron Core's planner of saves, which keepstep refuses to call."""

from keepstep.sharded.refused import refusing

_PLAN = "TorchDistSaveShardedStrategy plans each save itself"

__getattr__ = refusing(
    __name__,
    dict.fromkeys(
        (
            *("save_state_dict_async_plan", "save_state_dict_async_finalize", "verify_global_md_reuse"),
            "_compare_dataclasses",
        ),
        _PLAN,
    ),
)
