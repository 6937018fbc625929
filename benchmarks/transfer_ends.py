"""One end of a transfer, for both libraries, which differ in the module that is imported and in ``into``.

transfer_ends.py LIBRARY source|joiner BYTES TENSORS, then a JSON object a line on standard input, each answered by one:
{"stage": STEP, "num_chunks": N}; {"receive": STEP, "from": METADATA, "num_chunks": N, "in_place": true}.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

TIMEOUT = timedelta(seconds=120)


def transport_class(library):
    if library == "keepstep":
        from keepstep.checkpointing import HTTPTransport
    else:
        import logging

        from torchft.checkpointing.http_transport import HTTPTransport

        logging.disable()
    return HTTPTransport


def make(library, num_chunks):
    hostname = {"hostname": "127.0.0.1"} if library == "keepstep" else {}
    return transport_class(library)(TIMEOUT, num_chunks, **hostname)


def memory(field):
    """VmRSS: bytes in memory now. VmHWM: the most since ``forget_peak``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak():
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def state_of(size, tensors, value):
    return {"model": {f"layer.{i}": torch.full((size // tensors // 4,), float(value + i)) for i in range(tensors)}}


def source(library, size, tensors):
    state = state_of(size, tensors, 1)
    made = {}
    before = memory("VmRSS")
    for line in sys.stdin:
        ask = json.loads(line)
        num_chunks = ask["num_chunks"] if library == "torchft" else 0  # theirs is cut by the source, ours by the joiner
        if num_chunks not in made:
            made[num_chunks] = make(library, num_chunks)
        transport = made[num_chunks]
        started = time.perf_counter()
        transport.send_checkpoint([1], ask["stage"], state, TIMEOUT)
        seconds = time.perf_counter() - started
        print(
            json.dumps({"seconds": seconds, "metadata": transport.metadata(), "extra": memory("VmHWM") - before}),
            flush=True,
        )
    for transport in made.values():
        transport.shutdown()


def joiner(library, size, tensors):
    before = memory("VmRSS")
    into = None
    expected = [float(1 + i) for i in range(tensors)]
    for line in sys.stdin:
        ask = json.loads(line)
        transport = make(library, ask["num_chunks"])
        if ask["in_place"]:
            into = into or state_of(size, tensors, 0)
        keyword = {"into": into} if ask["in_place"] else {}
        forget_peak()
        started = time.perf_counter()
        state = transport.recv_checkpoint(0, ask["from"], ask["receive"], TIMEOUT, **keyword)
        seconds = time.perf_counter() - started
        peak = memory("VmHWM") - before
        transport.shutdown()
        ends = [(tensor[0].item(), tensor[-1].item()) for tensor in state["model"].values()]
        if ends != [(value, value) for value in expected]:
            raise ValueError("what was received is not what was sent")
        del state
        if ask["in_place"]:
            for tensor in into["model"].values():
                tensor.zero_()
        print(json.dumps({"seconds": seconds, "peak": peak}), flush=True)


if __name__ == "__main__":
    role = {"source": source, "joiner": joiner}[sys.argv[2]]
    role(sys.argv[1], int(sys.argv[3]), int(sys.argv[4]))
