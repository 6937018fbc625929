"""A process of its own at one end of a transfer. Its state is made from (step, size), so both ends know it.

checkpoint_peer.py source MIB          stages step 1, prints its address, then obeys lines: "stage N", end of input
checkpoint_peer.py reader URL STEP     prints "begun" after the first chunk and then takes no more until killed

Through relays (addresses with commas between), as one of several sources and joiners (names with commas between):

checkpoint_peer.py relay-source ME SOURCES JOINERS RELAYS MIB [UPLINK]
                                       stages step 1, prints its address, then as source
checkpoint_peer.py relay-joiner ME SOURCES JOINERS RELAYS URL
                                       heals; prints "begun" after the first chunk, "healed" at the end
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Iterable
from datetime import timedelta

import torch

from keepstep.checkpointing import HTTPTransport, RelayTransport
from keepstep.transfer.exchange import Exchange

MINUTE = timedelta(seconds=60)
JOB = "job"


def state_of(step: int, mib: int) -> dict[str, object]:
    weights = torch.arange(step << 40, (step << 40) + (mib << 17))
    return {"user": {"model": {"weights": weights, "bias": torch.full((3,), float(step))}}, "manager": {"step": step}}


def exchange(
    me: str, sources: Iterable[str], joiners: Iterable[str], step: int = 1, *, beside: Iterable[str] = ()
) -> Exchange:
    return Exchange(JOB, 1, step, step, me, 0, 1, tuple(sources), tuple(joiners), tuple(beside))


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


def relay_transport(
    me: str, sources: str, joiners: str, relays: str, uplink: float | None = None
) -> RelayTransport[object]:
    made: RelayTransport[object] = RelayTransport(
        MINUTE, lambda: relays.split(","), hostname="127.0.0.1", uplink=uplink
    )
    made.prepare(exchange(me, sources.split(","), joiners.split(",")))
    atexit.register(made.shutdown)  # as a Manager does
    return made


def relay_source(me: str, sources: str, joiners: str, relays: str, mib: str, uplink: str = "") -> None:
    transport = relay_transport(me, sources, joiners, relays, float(uplink) if uplink else None)
    transport.send_checkpoint([1], 1, state_of(1, int(mib)), MINUTE)
    print(transport.metadata(), flush=True)
    sys.stdin.readline()


def relay_joiner(me: str, sources: str, joiners: str, relays: str, url: str) -> None:
    transport = relay_transport(me, sources, joiners, relays)
    begun: list[bool] = []

    def begin(_done: int, _total: int) -> None:
        if not begun:
            print("begun", flush=True)
            begun.append(True)

    transport.recv_checkpoint(0, url, 1, MINUTE, progress=begin)
    print("healed", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case "source", mib:
            source(int(mib))
        case "reader", url, step:
            reader(url, int(step))
        case "relay-source", *arguments:
            relay_source(*arguments)
        case "relay-joiner", *arguments:
            relay_joiner(*arguments)
