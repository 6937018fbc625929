"""Some clients of one lighthouse in one process; started by ``quorum_round.py`` with either side's Python.

Each client requests a quorum, receives it, and requests the next one at once, with a step that grows as in training.
The output holds 64-bit floats: for each round the monotonic time at which the last client of this process received its
answer, then the processor seconds of this process.

Spare clients join one after another, each ``--join-every`` rounds after the last, and stay. From its second round on a
spare client reports the same step as all others, as if healed.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import importlib.util
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

TIMEOUT = 120.0


def coordination_of(side: str) -> Any:
    """Import what both sides call ``coordination``. It needs no torch, which torchft's package imports before it."""
    if side == "torchft":
        found = importlib.util.find_spec(side)
        sys.modules[side] = package = importlib.util.module_from_spec(found)
        package.__path__ = list(found.submodule_search_locations)
    return importlib.import_module(f"{side}.coordination")


def address(client: int) -> str:
    return f"http://10.{client >> 16 & 255}.{client >> 8 & 255}.{client & 255}:29400"


def name(client: int) -> str:
    return f"group_{client:05d}:2f0c8a5e-7a52-4f0e-9d5c-3f4f7be10c55"


class Clock:
    """When the last client of this process had its answer, round by round; and the processor time of it all."""

    def __init__(self, rounds: int, warm_up: int) -> None:
        self.last = array.array("d", bytes(8 * rounds))
        self._warm_up = warm_up
        self._cpu = 0.0

    def await_go(self) -> None:
        print("connected", flush=True)
        sys.stdin.readline()

    def answered(self, number: int, client: int) -> None:
        self.last[number] = time.monotonic()  # later ones overwrite: what stays is the last
        if client == 0 and number == self._warm_up:
            self._cpu = time.process_time()
            print("warm", flush=True)

    def write(self, out: str) -> None:
        self.last.append(time.process_time() - self._cpu)
        with open(out, "wb") as file:  # noqa: PTH123
            self.last.tofile(file)


def run_threads(options: argparse.Namespace, clock: Clock) -> None:
    """One thread and one ``LighthouseClient`` for each group; both sides have that class."""
    coordination = coordination_of(options.side)
    timeout = timedelta(seconds=TIMEOUT)
    clients = [coordination.LighthouseClient(options.address, timeout) for _ in range(options.count + options.spares)]
    joins = [threading.Event() for _ in range(options.spares)]

    def ask(client: int, step: int) -> int:
        """The step after the one that the quorum is for."""
        number = options.first + client
        here = address(number)
        quorum = clients[client].quorum(
            name(number), timeout, address=here, store_address=here, step=step, world_size=1
        )
        return step + 1 if client < options.count else max(one.step for one in quorum.participants) + 1

    def member(client: int) -> None:
        for step in range(options.rounds):
            ask(client, step)
            clock.answered(step, client)
            if client == 0 and (spare := spare_due(options, step)) is not None:
                joins[spare].set()

    def spare(number: int) -> None:
        joins[number].wait()
        step = 0
        while True:
            step = ask(options.count + number, step)

    for number in range(options.spares):
        threading.Thread(target=spare, args=(number,), daemon=True).start()
    clock.await_go()
    threads = [threading.Thread(target=member, args=(client,)) for client in range(options.count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def spare_due(options: argparse.Namespace, step: int) -> int | None:
    """The spare that joins after this step."""
    number, rest = divmod(step, options.join_every)
    return number - 1 if rest == 0 and 0 < number <= options.spares else None


async def run_sessions(options: argparse.Namespace, clock: Clock) -> None:
    """keepstep's sessions, as its ``Manager`` uses them, on one asyncio loop."""
    from keepstep.session.lighthouse_session import LighthouseSession, SessionSettings
    from keepstep_mesh.protocol.membership import MemberInfo
    from keepstep_mesh.protocol.messages import QuorumRequest

    sessions, infos = [], []
    for client in range(options.count + options.spares):
        settings = SessionSettings(
            addresses=(options.address,), job="bench", replica_id=name(options.first + client), connect_timeout=TIMEOUT
        )
        sessions.append(LighthouseSession(settings, lambda _push: None))
        here = address(options.first + client)
        infos.append(MemberInfo(address=here, store_address=here))
    joins = [asyncio.Event() for _ in range(options.spares)]
    await asyncio.gather(*(session.start() for session in sessions[: options.count]))

    async def ask(client: int, step: int, lineage: int | str) -> tuple[int, int]:
        """The step after the one that the quorum is for, and its lineage."""
        request = QuorumRequest(
            request=0,
            step=step,
            lineage=lineage,
            shrink_only=False,
            commit_failures=0,
            timeout_ms=round(1000 * TIMEOUT),
            info=infos[client],
        )
        quorum = await sessions[client].quorum(request)
        sessions[client].finished_step()
        return quorum.step + 1, quorum.quorum_id

    async def member(client: int) -> None:
        lineage: int | str = ""
        for step in range(options.rounds):
            _, lineage = await ask(client, step, lineage)
            clock.answered(step, client)
            if client == 0 and (spare := spare_due(options, step)) is not None:
                joins[spare].set()

    async def spare(number: int) -> None:
        await joins[number].wait()
        await sessions[options.count + number].start()
        step, lineage = 0, ""
        while True:
            step, lineage = await ask(options.count + number, step, lineage)

    spares = [asyncio.create_task(spare(number)) for number in range(options.spares)]
    await asyncio.to_thread(clock.await_go)
    await asyncio.gather(*(member(client) for client in range(options.count)))
    for task in spares:
        task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=("keepstep", "torchft"), required=True)
    parser.add_argument(
        "--through", choices=("client", "session"), required=True, help="LighthouseClient, or keepstep's session"
    )
    parser.add_argument("--address", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True, help="rounds after which the process prints `warm`")
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--join-every", type=int, default=10)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()

    clock = Clock(options.rounds, options.warm_up)
    if options.through == "client":
        run_threads(options, clock)
    else:
        asyncio.run(run_sessions(options, clock))
    clock.write(options.out)
    print("done", flush=True)
    os._exit(0)  # a spare of torchft may be blocked in its last request for another minute


if __name__ == "__main__":
    main()
