"""Measure the cost of the quorum's size for a local rank in each step: bytes from rank 0, and time for its plan.

A real group of two ranks runs on loopback. The lighthouse follows a script, because only its answers matter, and
reports a quorum of N members. ``unchanged``: all members have one step, as in training. ``changed``: each step has a
new list, as after each change of the quorum. The time of a rank is that of its thread from the frame to the plan:
decode the frame, restore the list, plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from figures import Figure, Limit, p50

from keepstep.group.group_server import GroupServer
from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep.group.ranks.rank_client import RankClient
from keepstep.group.ranks.rank_link import GroupSettings
from keepstep.group.ranks.rank_lists import ListKeeper
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.group_messages import RankAsk, RankQuorum
from keepstep_mesh.protocol.membership import Member, MemberInfo
from keepstep_mesh.protocol.messages import Quorum, QuorumRequest
from keepstep_mesh.testing import ScriptedSession, scripted_lighthouse

SIZES = (1, 1000, 3000)
STEPS = 200
CHANGED_STEPS = 20
LIMIT_MS = 0.1
"""Of an unchanged list of 1,000 groups."""


@dataclass
class Seen:
    """Measurements of one rank, one value per step."""

    plan_ms: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    """Of the group: from the ranks' requests until both have their answer; lighthouse and measuring included."""


def members(count: int, number: int) -> tuple[Member, ...]:
    """Return members with names and addresses as long as in a real job."""
    return tuple(
        Member(
            f"group-{one:04}:{one:08x}-7f36-4c2e-b7f1-{one:012x}",
            number,
            3,
            0,
            False,
            MemberInfo(*[f"http://10.0.{one >> 8}.{one & 255}:29511"] * 2, 8, "0" * 32, rendezvous=2),
        )
        for one in range(count)
    )


@contextlib.contextmanager
def frames_measured(seen: Seen, name: str):
    """Repeat decoding, restoring, and planning of every answer of the client, alone and timed."""
    decode, keeper = codec.decode, ListKeeper()
    previous: QuorumPlan | None = None

    def measured(frame: bytes, limit_bytes: int = codec.MAX_FRAME_BYTES) -> codec.Message:
        nonlocal previous
        message = decode(frame, limit_bytes)
        if isinstance(message, RankQuorum):
            began = time.thread_time()
            previous = make_plan(keeper.restored(decode(frame, limit_bytes)).quorum, name, previous)
            seen.plan_ms.append((time.thread_time() - began) * 1e3)
            seen.bytes.append(len(frame))
        return message

    codec.decode = measured
    try:
        yield
    finally:
        codec.decode = decode


async def answer(session: ScriptedSession, version: int, listed: tuple[Member, ...] | None, step: int) -> None:
    request = await session.next(QuorumRequest)
    session.send(Quorum(request.request, 1, 1, 0, version, step, 3, 0, listed is None, listed or ()))


async def measure(size: int, steps: int, *, changed: bool) -> Seen:
    seen, lists = Seen(), [members(size, number) for number in range(2)]
    name = lists[0][size // 2].replica_id
    async with scripted_lighthouse() as lighthouse:
        settings = SessionSettings((lighthouse.url,), "bench", name)
        server = GroupServer(GroupSettings(2, "127.0.0.1"), settings, print, lambda _: None)
        starting = asyncio.create_task(server.start())
        session = await lighthouse.session()
        await starting
        client = RankClient(server.address, 1, 2, 0, None, print, lambda _: None)
        await client.start(10)
        gc.collect()
        gc.freeze()
        with frames_measured(seen, name):
            for step in range(steps + 1):
                ask = RankAsk(step + 1, step, 3, False, 0, 10_000)
                listed = lists[step % 2] if changed or not step else None
                replying = asyncio.create_task(answer(session, step if changed else 1, listed, step))
                began = time.perf_counter()
                await asyncio.gather(server.ask(ask), client.ask(replace(ask)))
                seen.step_ms.append((time.perf_counter() - began) * 1e3)
                await replying
        await client.close()
        await server.close()
    return Seen(seen.plan_ms[1:], seen.bytes[1:], seen.step_ms[1:])  # the first step brings the first list


def run(*, quick: bool, log: Path) -> list[Figure]:  # noqa: ARG001  nothing is started
    figures = []
    for changed in (False, True):
        for size in SIZES:
            what = f"local rank, N={size}, {'changed' if changed else 'unchanged'}"
            print(f"{what} ...", flush=True)
            steps = (CHANGED_STEPS if changed else STEPS) // (4 if quick else 1)
            seen = asyncio.run(measure(size, steps, changed=changed))
            limit = Limit(value=LIMIT_MS) if size == 1000 and not changed else None
            definition = "time of the rank's thread from the frame of rank 0 to its plan"
            also = {"group_step_ms": p50(seen.step_ms)}
            figures += [
                Figure(f"{what}: plan", "ms", "p50", seen.plan_ms, limit=limit, definition=definition, also=also),
                Figure(f"{what}: frame", "bytes", "max", [float(one) for one in seen.bytes]),
            ]
    return figures
