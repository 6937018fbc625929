"""Run a member of ``rebuild.py``: build a new Gloo group on each command.

Commands, one per line: ``ours NUMBER ADDRESS``, ``tcp NUMBER ADDRESS``, ``counts``. Member 0 hosts both stores in its
own process and first prints their addresses: keepstep's table in a thread with an event loop, as rank 0 of a group
does, and a TCPStore.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from datetime import timedelta

from aiohttp import web
from torch.distributed import PrefixStore, TCPStore

from keepstep.process_group import ProcessGroupGloo
from keepstep.rendezvous.store_client import KeyValueServer, RendezvousStore, Table

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)


class Host:
    """The two stores of member 0."""

    def __init__(self) -> None:
        self.table = KeyValueServer()
        self.requests = 0
        self.sent = 0
        self.tcp = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        self.address = ""
        listening = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(listening)), daemon=True).start()
        listening.wait()

    async def _serve(self, listening: threading.Event) -> None:
        @web.middleware
        async def counted(request, handler):
            answer = await handler(request)
            self.requests += 1
            self.sent += len(answer.body)
            return answer

        app = web.Application(middlewares=[counted])
        app.add_routes(self.table.routes())
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        self.address = f"http://{HOST}:{runner.addresses[0][1]}"
        listening.set()
        await asyncio.Event().wait()

    def held(self) -> int:
        """Return the bytes in keepstep's table."""
        return sum(one.size for one in self.table._tables.values())  # noqa: SLF001


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    group = ProcessGroupGloo(TIMEOUT)
    host = Host() if rank == 0 else None
    tcp = host.tcp if host else None
    print("ready", *([host.address, f"{HOST}:{host.tcp.port}"] if host else []), flush=True)
    for line in sys.stdin:
        kind, *rest = line.split()
        if kind == "counts":
            print(host.held(), host.requests, host.sent, flush=True)
            host.requests = host.sent = 0
            continue
        number, address = int(rest[0]), rest[1]
        if kind == "ours":
            table = host.table if host else None
            store = RendezvousStore(address, Table(quorum_id=number), timeout=TIMEOUT, server=table)
            group.configure("", f"r{rank}", rank, size, number, store=store, host=HOST)
            store.close()
        else:
            if tcp is None:  # opened once, before the rebuilds that count: that takes 5 s where no name server answers
                port = int(address.rpartition(":")[2])
                tcp = TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
            group.configure("", f"r{rank}", rank, size, number, store=PrefixStore(str(number), tcp), host=HOST)
        print("built", flush=True)
    group.shutdown()


if __name__ == "__main__":
    main()
