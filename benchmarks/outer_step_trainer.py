"""Take outer steps of DiLoCo in one replica group of one rank, for ``outer_step.py``.

Both libraries share the loop and differ in the imported module. Every inner step ends a period, so that each call of
the inner optimizer's ``step`` takes an outer step. Each outer step writes a line: its seconds, and the bytes that the
loopback interface has sent so far.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

WIDTH = {"1M": 512, "100M": 2048}
LAYERS = {"1M": 4, "100M": 24}


def network(size: str) -> nn.Module:
    """Return a model of 1.05 or 101 million parameters, in 8 or 48 tensors."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH[size], WIDTH[size]) for _ in range(LAYERS[size])))


def codec(name: str) -> Any:
    from keepstep.collectives.codecs import Quantized, TopK, TwoBit

    return {"quantized": Quantized, "top-k": lambda: TopK(1 / 64), "two-bit": TwoBit}[name]()


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has sent."""
    (line,) = [one for one in Path("/proc/net/dev").read_text().splitlines() if one.strip().startswith("lo:")]
    return int(line.split()[9])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=("torchft", "keepstep"), required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--model", choices=sorted(WIDTH), required=True)
    parser.add_argument("--codec", default="none")
    parser.add_argument("--buckets", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    library = importlib.import_module(options.library)
    process_group = importlib.import_module(f"{options.library}.process_group")
    local_sgd = importlib.import_module(f"{options.library}.local_sgd")
    # torchrun's environment of every rank
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    os.environ["TORCHFT_LIGHTHOUSE"] = options.lighthouse

    model = network(options.model)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    timeout = timedelta(seconds=60)
    manager = library.Manager(
        pg=process_group.ProcessGroupGloo(timeout=timeout),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=options.groups,
        use_async_quorum=False,
        timeout=timeout,
        replica_id=f"group_{options.group}",
    )
    extra = {} if options.codec == "none" else {"codec": codec(options.codec)}
    diloco = local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=1, use_bucketization=options.buckets, **extra)
    random = torch.Generator().manual_seed(options.group)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random)
    gradients = [parameter.grad for parameter in model.parameters()]
    with open(options.out, "w", encoding="ascii") as out, diloco:  # noqa: PTH123
        while manager.current_step() < options.steps:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient  # torchft's outer step clears it
            step, began = manager.current_step(), time.perf_counter()
            inner.step()
            if manager.current_step() > step:
                out.write(f"{time.perf_counter() - began:.9f} {loopback_bytes()}\n")
    manager.shutdown()


if __name__ == "__main__":
    main()
