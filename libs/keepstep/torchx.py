"""The torchx component ``hsdp``, with torchft's parameters. It needs torchx, which it imports when it is called.

torchx reads the annotations as types, so this module has no ``from __future__ import annotations``.
"""

import os
from typing import TYPE_CHECKING, Dict, Optional  # noqa: UP035  torchx 0.7 knows only these

from keepstep_mesh.config.settings import split_addresses

if TYPE_CHECKING:
    from torchx.specs import AppDef

LIGHTHOUSE = ("KEEPSTEP_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE")
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Make torchrun open a store for each start of a group: Gloo of torch 2.13 would read addresses of the last start."""


def hsdp(
    *script_args: str,
    replicas: int = 2,
    workers_per_replica: int = 1,
    max_restarts: int = 10,
    script: str = "train_ddp.py",
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    image: str = "",
    h: Optional[str] = None,  # noqa: UP045
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,  # noqa: N803  torchft's name
) -> "AppDef":
    """Run the replica groups of a job, each as a role with a torchrun of its own.

    The lighthouse runs elsewhere. Its address is KEEPSTEP_LIGHTHOUSE (or TORCHFT_LIGHTHOUSE) in `env`, else in the
    environment of the caller.

    Args:
        script_args: arguments of the script
        replicas: number of replica groups
        workers_per_replica: ranks of each group
        max_restarts: how often torchrun restarts a group, and the scheduler the torchrun of a group
        script: path of the training script in the image
        env: environment variables of all groups, such as KEEPSTEP_LIGHTHOUSE=http://l1:29510
        image: image, or folder, that contains the script
        h: named resource of each group; overrides cpu, gpu, and memMB
        cpu: CPUs of each group
        gpu: GPUs of each group
        memMB: memory of each group, in MB

    Returns:
        The app, for a scheduler of torchx.

    Raises:
        ImportError: torchx is not installed.
        ValueError: a number is out of range, or the address of the lighthouse is missing or invalid.
    """
    for name, number, least in (
        ("replicas", replicas, 1),
        ("workers_per_replica", workers_per_replica, 1),
        ("max_restarts", max_restarts, 0),
    ):
        if number < least:
            raise ValueError(f"{name}={number} must be at least {least}")
    variables = NEW_STORE | {name: os.environ[name] for name in LIGHTHOUSE if os.environ.get(name)} | (env or {})
    lighthouse = next((variables[name] for name in LIGHTHOUSE if variables.get(name)), None)
    if lighthouse is None:
        raise ValueError(
            "no lighthouse address: pass --env KEEPSTEP_LIGHTHOUSE=http://host:29510, or set that variable "
            "(`keepstep lighthouse` starts one)"
        )
    split_addresses(lighthouse)
    try:
        from torchx import specs  # noqa: PLC0415  optional, and slow
    except ModuleNotFoundError as error:
        raise ImportError("keepstep.torchx.hsdp needs torchx: pip install 'keepstep[torchx]'") from error
    torchrun = ["--standalone", f"--nproc-per-node={workers_per_replica}", f"--max-restarts={max_restarts}"]
    return specs.AppDef(
        name="keepstep",
        roles=[
            specs.Role(
                name=f"replica_{number}",
                image=image,
                entrypoint="torchrun",
                args=[*torchrun, script, *script_args],
                env={**variables, "REPLICA_GROUP_ID": str(number), "NUM_REPLICA_GROUPS": str(replicas)},
                max_retries=max_restarts,
                retry_policy=specs.RetryPolicy.REPLICA,
                resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
            )
            for number in range(replicas)
        ],
    )
