"""Run a member of ``groups.py``: join process groups of one library, and reduce tensors in them.

Commands, one per line:

    configure gloo|baby RANK SIZE NUMBER ADDRESS   leave the group of that kind and join the next one
    allreduce gloo|baby BYTES COUNT                all-reduce a tensor COUNT times; answers the milliseconds of each

keepstep's members meet over its rendezvous, as under its Manager. torchft's Manager takes the addresses of the members
from its lighthouse; here torchft's own ``reconfigure_with_store`` exchanges them over a TCPStore. Member 0 hosts the
store and first prints its address.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from datetime import timedelta

import torch
from torch.distributed import ReduceOp, TCPStore

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)
CLASSES = {"gloo": "ProcessGroupGloo", "baby": "ProcessGroupBabyGloo"}


class Member:
    def __init__(self, library: str, *, hosts: bool) -> None:
        self._library = library
        self._classes = importlib.import_module(f"{library}.process_group")
        self._groups: dict[str, object] = {}
        self._rendezvous = self._tcp = None
        self.address = ""
        if hosts and library == "keepstep":
            self._rendezvous = importlib.import_module("rebuild_ends").Host()
            self.address = self._rendezvous.address
        elif hosts:
            self._tcp = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
            self.address = f"{HOST}:{self._tcp.port}"

    def configure(self, kind: str, rank: int, size: int, number: int, address: str) -> None:
        if kind not in self._groups:
            self._groups[kind] = getattr(self._classes, CLASSES[kind])(timeout=TIMEOUT)
        group, name = self._groups[kind], f"r{rank}"
        if self._library == "torchft":
            self._classes.reconfigure_with_store(group, f"{address}/{kind}/{number}", rank, size, TIMEOUT)
            return
        client = importlib.import_module("keepstep.rendezvous.store_client")
        table = self._rendezvous.table if self._rendezvous else None
        store = client.RendezvousStore(address, client.Table(quorum_id=number), timeout=TIMEOUT, server=table)
        group.configure("", name, rank, size, number, store=store, host=HOST)
        store.close()

    def allreduce(self, kind: str, size: int, count: int) -> list[float]:
        tensor = torch.zeros(size // 4)
        milliseconds = []
        for _ in range(count):
            began = time.perf_counter()
            self._groups[kind].allreduce([tensor], ReduceOp.SUM).wait()
            milliseconds.append((time.perf_counter() - began) * 1e3)
        return milliseconds

    def shutdown(self) -> None:
        for group in self._groups.values():
            group.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=("torchft", "keepstep"), required=True)
    parser.add_argument("--hosts", action="store_true", help="host the store")
    options = parser.parse_args()
    member = Member(options.library, hosts=options.hosts)
    print("ready", member.address, flush=True)
    for line in sys.stdin:
        command, kind, *rest = line.split()
        if command == "configure":
            rank, size, number, address = rest
            member.configure(kind, int(rank), int(size), int(number), address)
            print("done", flush=True)
        else:
            print("done", *member.allreduce(kind, *map(int, rest)), flush=True)
    member.shutdown()
    os._exit(0)  # torch sometimes aborts while its threads are torn down


if __name__ == "__main__":
    main()
