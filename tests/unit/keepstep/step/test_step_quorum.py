"""A request for a quorum that is withdrawn while the event loop thread is busy."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

from keepstep.runtime.loop_thread import LoopThread
from keepstep.step.context import HealCounts
from keepstep.step.first_error import FirstError
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep.step.step_quorum import HealRules, StepQuorum
from keepstep_mesh.protocol.group_messages import RankAsk

DEADLINE = 30.0


def test_a_withdrawn_request_has_heard_of_it_although_the_event_loop_thread_was_busy() -> None:
    loop_thread, busy, go_on = LoopThread(), threading.Event(), threading.Event()
    ends: list[str] = []

    async def no_evidence() -> None:
        return None

    async def ask(_ask: RankAsk) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    def handle_an_answer() -> None:
        busy.set()
        go_on.wait(DEADLINE)

    try:
        evidence, link = SimpleNamespace(collect=no_evidence), SimpleNamespace(ask=ask)
        context: Any = SimpleNamespace(
            loop_thread=loop_thread, follower=None, heals=HealCounts(), evidence=evidence, link=link
        )
        rules = HealRules(allow_heal=True, sync=False, first_step=False)
        pending = StepQuorum(context, rules, StepTimes(0.0), cast("FirstError", None))
        pending.request(RankAsk(1, 0, "", False, 0, 1000))
        loop_thread.loop.call_soon_threadsafe(handle_an_answer)
        assert busy.wait(DEADLINE)
        release = threading.Timer(0.2, go_on.set)  # withdraw() blocks this thread
        release.start()
        pending.withdraw()
        assert ends == ["cancelled"]
        assert pending.failed
        release.join()
    finally:
        go_on.set()
        loop_thread.stop()
    pending.withdraw()
