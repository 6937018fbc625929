"""Modules, names, and variables of torchft that keepstep does not have, and what to use instead. Pure."""

from __future__ import annotations

MODULES = {
    "_torchft": "keepstep.coordination has its classes",
    "otel": "KEEPSTEP_OTEL exports spans and logs, see docs/telemetry.md",
    "torchcomms": "use a process group of keepstep.process_group",
    "utils": "torch.accelerator has streams and synchronize for every device",
}
"""Modules of torchft."""

NAMES = {
    "coordination": {
        "Timestamp": "Quorum.created is a number, in seconds of Unix time",
        "lighthouse_main": "run the command `keepstep lighthouse`",
    },
    "manager": {
        "ExceptionWithTraceback": "Manager.errored() returns the exception itself",
        "extract_trailing_digits": "read the number of the group from the variable REPLICA_GROUP_ID",
        "get_timeout": "the Manager itself reads its limits from the environment",
    },
    "process_group": {
        "create_store_client": "use torch.distributed.TCPStore and PrefixStore",
        "trigger_nccl_fr_trace_through_pipe": "write to the pipe that TORCH_NCCL_DEBUG_INFO_PIPE_FILE names",
    },
}
"""Names of torchft, by the module that has them."""

VARIABLES = {
    "TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON": "keepstep has no OpenTelemetry; its metrics service records every step",
    "TORCHFT_TRIGGER_FR_ON_ABORT": "keepstep does not ask NCCL's flight recorder for a trace",
    "TORCHFT_USE_BUCKETIZATION": "pass use_bucketization=True to DiLoCo",
    "TORCHFT_USE_OTEL": "keepstep has no OpenTelemetry; its metrics service records every step",
}
"""Environment variables of torchft that have no effect. Every other one of torchft does what it does there."""


def of_module(path: str) -> str:
    """Return why ``torchft.<path>`` cannot be imported."""
    instead = MODULES.get(path, "docs/parity.md lists the public names of torchft")
    return f"keepstep, which stands in for torchft, has no module {path!r}: {instead}"


def of_name(module: str, name: str) -> str | None:
    """Return why ``torchft.<module>`` has no ``name``; None if torchft does not have it either."""
    instead = NAMES.get(module, {}).get(name)
    return instead and f"keepstep, which stands in for torchft, has no {module}.{name}: {instead}"
