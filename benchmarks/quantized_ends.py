"""Run a member of ``quantized.py``: reduce a tensor on each command.

Arguments: rank, size, own address, and the address of the store (empty in member 0, which hosts it and prints its
address). Commands, one per line: ``KIND MIB`` with KIND ``fp32`` or ``int8``. The answer: seconds from a barrier to the
end of the reduction, bytes that the interface sent, and the relative error.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import ReduceOp, TCPStore

from keepstep.collectives import allreduce_quantized
from keepstep.process_group import ProcessGroupGloo

TIMEOUT = timedelta(seconds=120)


def sent() -> int:
    """Return the bytes that all interfaces of this network namespace sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def main() -> None:
    rank, size, own, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    if rank == 0:
        hosted = TCPStore(own, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        store = f"{own}:{hosted.port}"
        print(store, flush=True)
    group = ProcessGroupGloo(TIMEOUT)
    group.configure(f"{store}/bench", f"r{rank}", rank, size, host=own)
    print("ready", flush=True)
    for line in sys.stdin:
        kind, mib = line.split()
        inputs = [torch.randn(int(mib) << 18, generator=torch.Generator().manual_seed(one)) for one in range(size)]
        expected = torch.stack(inputs).mean(0)
        tensor = inputs[rank]
        group.barrier().wait()
        before, began = sent(), time.perf_counter()
        if kind == "int8":
            allreduce_quantized([tensor], ReduceOp.AVG, group).wait()
        else:
            group.allreduce([tensor], ReduceOp.AVG).wait()
        seconds = time.perf_counter() - began
        error = float((tensor - expected).norm() / expected.norm())
        print(seconds, sent() - before, error, flush=True)
    group.shutdown()


if __name__ == "__main__":
    main()
