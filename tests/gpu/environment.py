"""Devices and environment variables of the ranks of one check. Pure.

Each rank has a GPU of its own if the machine has enough of them. Otherwise several ranks share one, which NCCL refuses
for two ranks of one host. Before version 2.30 each rank therefore claims another host, and they communicate over
sockets of the loopback interface; from 2.30 on NCCL has a variable that allows it.
"""

from __future__ import annotations

SHARES_GPUS_FROM = (2, 30)
"""First version of NCCL with ``NCCL_MULTI_RANK_GPU_ENABLE``."""

LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
SOCKETS_ONLY = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
"""For ranks of one GPU that claim to be on different hosts: everything that needs a common host is off."""


def device_of(rank: int, gpus: int) -> str:
    """Return the device of a rank. ``gpus``: number of GPUs of the machine; 0: use the CPU."""
    return f"cuda:{rank % gpus}" if gpus else "cpu"


def environment_of(rank: int, ranks: int, gpus: int, nccl: tuple[int, ...] | None) -> dict[str, str]:
    """Return the variables of a rank, to add to those of the runner.

    Args:
        rank: of the check.
        ranks: number of ranks of the check.
        gpus: number of GPUs of the machine; 0: the check runs on the CPU.
        nccl: version of NCCL; None: torch has none.
    """
    if not gpus or ranks <= gpus:
        return dict(LOOPBACK)
    if nccl is not None and nccl >= SHARES_GPUS_FROM:
        return LOOPBACK | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return LOOPBACK | SOCKETS_ONLY | {"NCCL_HOSTID": f"ks-{rank}"}
