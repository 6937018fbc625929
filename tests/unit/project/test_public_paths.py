"""A script that was written for torchft finds each public class and function under the same dotted name."""

from __future__ import annotations

import importlib
import inspect

import pytest

PUBLIC = {
    "": (
        "DistributedDataParallel DistributedSampler Manager Optimizer "
        "ProcessGroupGloo ProcessGroupNCCL ProcessGroupXCCL"
    ),
    "checkpointing": "CheckpointTransport HTTPTransport",
    "checkpointing.http_transport": "HTTPTransport",
    "checkpointing.pg_transport": "PGTransport",
    "checkpointing.transport": "CheckpointTransport",
    "collectives": ("allocate_reduce_scatter_output allreduce_quantized get_padded_sizes reduce_scatter_quantized"),
    "coordination": "LighthouseClient LighthouseServer ManagerClient ManagerServer Quorum QuorumMember",
    "data": "DistributedSampler",
    "ddp": "DistributedDataParallel PureDistributedDataParallel",
    "futures": "context_timeout future_timeout future_wait stream_timeout",
    "local_sgd": "DiLoCo LocalSGD extract_local_tensor",
    "manager": "Manager WorldSizeMode",
    "optim": "OptimizerWrapper",
    "parameter_server": "ParameterServer",
    "quantization": "fused_dequantize_from_fp8 fused_quantize_into_fp8 fused_reduce_fp8",
    "process_group": (
        "ErrorSwallowingProcessGroupWrapper FakeProcessGroupWrapper ManagedProcessGroup ProcessGroup ProcessGroupDummy "
        "ProcessGroupGloo ProcessGroupNCCL ProcessGroupWrapper ProcessGroupXCCL"
    ),
    "torchx": "hsdp",
}
"""Of torchft-nightly 2026.10.26: its modules, with their public names that keepstep has.

``ProcessGroupBaby*`` is missing. ``manager.ExceptionWithTraceback`` has no counterpart: ``Manager.errored`` returns the
exception itself.
"""


@pytest.mark.parametrize("module", PUBLIC)
def test_a_public_name_of_torchft_has_the_same_path(module: str) -> None:
    found = importlib.import_module(f"keepstep.{module}" if module else "keepstep")
    for name in PUBLIC[module].split():
        thing = getattr(found, name, None)
        assert inspect.isclass(thing) or inspect.isfunction(thing), f"{found.__name__}.{name}"
