"""Run one end of a transfer, for both libraries; they differ in the imported module, in ``into``, and in relays.

transfer_ends.py LIBRARY source|joiner BYTES TENSORS ADDRESS NAME reads one JSON object per line from standard input and
answers each with one: {"stage": STEP, "num_chunks": N}; {"receive": STEP, "from": METADATA, "num_chunks": N,
"in_place": true}. "relay": URL, "sources": NAMES, "joiners": NAMES select a transfer through that relay. "staged" and
"ended" in the answers are times of a clock that all processes share.

Every step has a new state, so that no relay has a part of it.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

TIMEOUT = timedelta(seconds=120)


class Transports:
    """Transports by number of chunks. Each asks for its relays before each transfer."""

    def __init__(self, library, address, name):
        self.library, self.address, self.name = library, address, name
        self.made = {}
        self.relays = []

    def for_ask(self, ask, step):
        num_chunks = ask["num_chunks"]
        if num_chunks not in self.made:
            self.made[num_chunks] = self.make(num_chunks)
        transport = self.made[num_chunks]
        self.relays[:] = []
        if "relay" in ask:
            from keepstep.transfer.exchange import Exchange

            self.relays.append(ask["relay"])
            groups = tuple(ask["sources"]), tuple(ask["joiners"])
            transport.prepare(Exchange("bench", 1, step, step, self.name, 0, 1, *groups))
        return transport

    def make(self, num_chunks):
        if self.library == "keepstep":
            from keepstep.checkpointing import RelayTransport

            return RelayTransport(TIMEOUT, lambda: self.relays, num_chunks, self.address)
        import logging

        from torchft.checkpointing.http_transport import HTTPTransport

        logging.disable()
        return HTTPTransport(TIMEOUT, num_chunks)

    def shutdown(self):
        for transport in self.made.values():
            transport.shutdown()


def memory(field):
    """Return VmRSS (resident bytes) or VmHWM (their peak since ``forget_peak``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak():
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def state_of(size, tensors):
    return {"model": {f"layer.{i}": torch.full((size // tensors // 4,), 1.0) for i in range(tensors)}}


def value(step, tensors, i):
    return float(step * tensors + i + 1)


def source(transports, size, tensors):
    state = state_of(size, tensors)
    before = memory("VmRSS")
    for line in sys.stdin:
        ask = json.loads(line)
        step = ask["stage"]
        if transports.library == "keepstep":
            ask["num_chunks"] = 0  # torchft's source cuts the chunks, keepstep's joiner does
        transport = transports.for_ask(ask, step)
        for i, tensor in enumerate(state["model"].values()):
            tensor.fill_(value(step, tensors, i))
            marks = tensor[1 :: 1 << 18]
            marks += torch.arange(len(marks))  # no two chunks are equal, because equal ones are sent once
        began = time.monotonic()
        transport.send_checkpoint([1], step, state, TIMEOUT)
        staged = time.monotonic()
        metadata = transport.metadata().replace(socket.gethostname(), transports.address)
        extra = memory("VmHWM") - before
        answer = {"seconds": staged - began, "staged": staged, "metadata": metadata, "extra": extra}
        print(json.dumps(answer), flush=True)


def joiner(transports, size, tensors):
    before = memory("VmRSS")
    into = None
    for line in sys.stdin:
        ask = json.loads(line)
        step = ask["receive"]
        if ask["in_place"]:
            into = into or state_of(size, tensors)
        keyword = {"into": into} if ask["in_place"] else {}
        transport = transports.for_ask(ask, step)
        began = time.monotonic()
        state = transport.recv_checkpoint(0, ask["from"], step, TIMEOUT, **keyword)
        ended = time.monotonic()
        peak = memory("VmHWM") - before
        ends = [(tensor[0].item(), tensor[-1].item()) for tensor in state["model"].values()]
        if ends != [(value(step, tensors, i),) * 2 for i in range(tensors)]:
            raise ValueError("what was received is not what was sent")
        del state
        if ask["in_place"]:
            for tensor in into["model"].values():
                tensor.zero_()
        forget_peak()  # takes time outside of the measurement
        print(json.dumps({"seconds": ended - began, "ended": ended, "peak": peak}), flush=True)


if __name__ == "__main__":
    library, role, size, tensors, address, name = sys.argv[1:]
    transports = Transports(library, address, name)
    try:
        {"source": source, "joiner": joiner}[role](transports, int(size), int(tensors))
    finally:
        transports.shutdown()
