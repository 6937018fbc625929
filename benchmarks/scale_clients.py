"""Some groups of a large job in one process; started by ``scale.py``.

Each group is a real session of the client library with what is on by default: its settings and layout, the report of
its last step, its failure, a port that answers the lighthouse, and a sender of telemetry. In place of training it waits
``--step-seconds``. A loss breaks its step: it asks for the same step again. A group that joins takes the state of the
others at once.

The output holds four 64-bit floats for each answer: monotonic time, number of the group, quorum_id, step.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import contextlib
import functools
import gc
import json
import sys
import time
from pathlib import Path

from quorum_clients import name

from keepstep.session.lighthouse_session import LighthouseSession, SessionSettings
from keepstep.session.session_events import Push
from keepstep_mesh.net.event_loop import new_event_loop
from keepstep_mesh.net.http import Identity
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.membership import UNKNOWN, MemberInfo, StepFailure, StepReport, settings_text
from keepstep_mesh.protocol.messages import MemberLost, QuorumRequest, RoundBroken
from keepstep_mesh.protocol.telemetry_records import StepRecord
from keepstep_mesh.telemetry.record_sender import Sender

JOB = "bench"
TIMEOUT = 120.0
SETTINGS = settings_text({"init_sync": True, "world_size_mode": "dynamic", "use_async_quorum": True})
COLLECTIVES = 12
"""Of a step; equal in all groups."""


class Group:
    """One group: its session, its port, its sender, and its steps."""

    def __init__(self, options: argparse.Namespace, number: int, answers: array.array[float]) -> None:
        self._options = options
        self._number = number
        self._answers = answers
        self._broken = asyncio.Event()
        addresses = tuple(options.addresses.split(","))
        settings = SessionSettings(addresses, JOB, name(number), connect_timeout=TIMEOUT)
        self._session = LighthouseSession(settings, self._on_push)
        self._sender = Sender("worker", name(number), lambda: options.metrics, Identity(), job=JOB)

    def _on_push(self, push: Push) -> None:
        if isinstance(push, MemberLost | RoundBroken):
            self._broken.set()

    async def start(self) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        here = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._info = MemberInfo(here, here, 8, "f" * 64)
        await self._session.start()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the lighthouse, which looks at each port once."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(TIMEOUT):
                await reader.readuntil(b"\r\n\r\n")
                body = json.dumps({"replica_id": name(self._number)}).encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
                await writer.drain()
        writer.close()

    async def train(self) -> None:
        """Take steps until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._options.metrics:
                tasks.create_task(self._sender.run())
            await self._step_by_step()

    async def _step_by_step(self) -> None:
        step, lineage, failures = 0, "", 0
        report: StepReport | None = None
        failure: StepFailure | None = None
        began = time.monotonic()
        while True:
            request = QuorumRequest(
                *(0, step, lineage, False, failures, round(1000 * TIMEOUT), self._info),
                settings=SETTINGS,
                last_step=report,
                failure=failure,
            )
            quorum = await self._session.quorum(request)
            now = time.monotonic()
            self._answers.extend((now, self._number, quorum.quorum_id, quorum.step))
            waited = now - began
            self._broken.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._broken.wait(), self._options.step_seconds)
            self._session.finished_step()
            step, failed = quorum.step, self._broken.is_set()
            report = StepReport(quorum.quorum_id, step, not failed, COLLECTIVES)
            if failed:
                failure, failures = StepFailure(quorum.quorum_id, UNKNOWN, (), "a member was lost"), failures + 1
            else:
                failure, failures, step, lineage = None, 0, step + 1, quorum.quorum_id
            ended = time.monotonic()
            self._sender.record(self._record(step, quorum.quorum_id, not failed, ended - began, waited))
            began = ended

    def _record(self, step: int, quorum_id: int, committed: bool, seconds: float, waited: float) -> StepRecord:
        return StepRecord(
            t=time.time(),
            step=step,
            quorum_id=quorum_id,
            committed=committed,
            seconds=seconds,
            quorum_seconds=waited,
            busy_seconds=max(0.0, seconds - waited),
            values={"loss": 2.0 / (1 + step)},
        )


async def run(options: argparse.Namespace) -> None:
    answers = array.array("d")
    groups = [Group(options, options.first + number, answers) for number in range(options.count)]
    await asyncio.gather(*(group.start() for group in groups))
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    tasks = [asyncio.create_task(group.train()) for group in groups]
    await asyncio.to_thread(sys.stdin.readline)
    for task in tasks:
        if task.done():
            task.result()  # raises its error
        task.cancel()
    await asyncio.to_thread(Path(options.out).write_bytes, answers.tobytes())
    print("done", flush=True)


def main() -> None:
    # A group has a process of its own in reality. Here hundreds share one: equal lists of members are decoded once, and
    # the collector does not visit them again and again. Otherwise these clients take most of the time of a change.
    codec.decode = functools.lru_cache(maxsize=16)(codec.decode)
    gc.disable()
    parser = argparse.ArgumentParser()
    parser.add_argument("--addresses", required=True, help="lighthouses, separated by commas")
    parser.add_argument("--metrics", default="", help="address of the metrics service; empty: no telemetry")
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--out", required=True)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:  # as that of a worker
        runner.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
