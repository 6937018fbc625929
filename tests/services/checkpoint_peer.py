"""A process of its own at one end of a transfer. Its state is made from (step, size), so both ends know it.

checkpoint_peer.py source MIB          stages step 1, prints its address, then obeys lines: "stage N", end of input
checkpoint_peer.py reader URL STEP     prints "begun" after the first chunk and then takes no more until killed
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta

import torch

from keepstep.checkpointing import HTTPTransport

MINUTE = timedelta(seconds=60)


def state_of(step: int, mib: int) -> dict[str, object]:
    weights = torch.arange(step << 40, (step << 40) + (mib << 17))
    return {"user": {"model": {"weights": weights, "bias": torch.full((3,), float(step))}}, "manager": {"step": step}}


def source(mib: int) -> None:
    transport: HTTPTransport[object] = HTTPTransport(MINUTE, 0, hostname="127.0.0.1")
    transport.send_checkpoint([1], 1, state_of(1, mib), MINUTE)
    print(transport.metadata(), flush=True)
    for line in sys.stdin:
        step = int(line.split()[1])
        transport.send_checkpoint([1], step, state_of(step, mib), MINUTE)
        print("staged", flush=True)
    transport.shutdown()


def reader(url: str, step: int) -> None:
    transport: HTTPTransport[object] = HTTPTransport(MINUTE, 0, hostname="127.0.0.1")

    def stop(_done: int, _total: int) -> None:
        print("begun", flush=True)
        threading.Event().wait()

    transport.recv_checkpoint(0, url, step, MINUTE, progress=stop)


if __name__ == "__main__":
    if sys.argv[1] == "source":
        source(int(sys.argv[2]))
    else:
        reader(sys.argv[2], int(sys.argv[3]))
