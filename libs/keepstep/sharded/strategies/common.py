"""Public: values without sharding in a file, under the names of Megatron Core."""

from keepstep_megatron.strategies.common_file import COMMON_STATE_FNAME
from keepstep_megatron.strategies.common_file import CommonFileLoad as TorchCommonLoadStrategy
from keepstep_megatron.strategies.common_file import CommonFileSave as TorchCommonSaveStrategy

__all__ = [
    "COMMON_STATE_FNAME",
    "TorchCommonLoadStrategy",
    "TorchCommonSaveStrategy",
    "register_default_common_strategies",
]


def register_default_common_strategies() -> None:
    """Do nothing: the strategies are registered."""
