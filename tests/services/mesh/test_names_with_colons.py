"""Groups ``a:0`` and ``a:1``, real ones, are two: for the lighthouse, the metrics service, orders and bans."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any
from urllib.parse import quote

from keepstep.runtime.exits import EvictedExit
from keepstep_mesh.protocol.policy import Policy
from tests.services.manager.groups import manager
from tests.support.services.lighthouse_driver import eventually, lighthouse
from tests.support.services.metrics_driver import client, metrics

JOB = "/v1/jobs/default"
NAMES = ["a:0", "a:1"]


class Trainer(threading.Thread):
    """Commits steps until it is stopped, or its session is over."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__()
        self.address, self.group = address, name
        self.committed = 0
        self.together = 0
        """Steps committed by two groups."""
        self.ended: BaseException | None = None
        self.stopping = False
        self.start()

    def run(self) -> None:
        try:
            with manager(self.address, self.group) as one:
                while not self.stopping:
                    one.start_quorum()
                    if one.should_commit():
                        self.committed += 1
                        self.together += one.num_participants() == 2
                    time.sleep(0.01)  # the pace of a step, not a wait
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.ended = error

    async def stop(self) -> None:
        self.stopping = True
        await asyncio.to_thread(self.join, 60)


def order(name: str, what: str) -> str:
    return f"{JOB}/replicas/{quote(name, safe='')}/{what}"


async def test_two_groups_whose_names_differ_behind_a_colon_stay_two() -> None:
    policy = Policy(min_replicas=1, join_timeout=1.0)
    async with (
        lighthouse(policy=policy) as known,
        metrics(lighthouses=(known.address,)) as told,
        client(known.address) as orders,
        client(told.address) as asking,
    ):
        trainers = [Trainer(known.address, name) for name in NAMES]
        try:
            await eventually(lambda: all(one.together > 3 for one in trainers))
            listed = (await orders.call("GET", f"{JOB}/replicas"))["replicas"]
            assert [one["name"] for one in listed] == NAMES

            def both(now: Any) -> bool:
                return now["participants"] == NAMES and [one["name"] for one in now["groups"]] == NAMES

            await asking.until("now", both, "default")
            lines = (await asking.get("timeline", "default"))["groups"]
            assert [one["name"] for one in lines] == NAMES
            await asking.until("goodput", lambda it: it["steps_committed"] > 3, "default")

            body = {"reason": "bad host", "ban_seconds": 500}
            said = await orders.call("POST", order("a:1", "evict"), 202, json=body)
            assert said["sentence"].endswith("a:1 is banned for 500 s")
            await eventually(lambda: isinstance(trainers[1].ended, EvictedExit))
            before = trainers[0].committed
            await eventually(lambda: trainers[0].committed > before + 3)
            trainers.append(Trainer(known.address, "a:1"))
            await eventually(lambda: isinstance(trainers[-1].ended, EvictedExit))

            def evicted(it: Any) -> Any:
                return [one for one in it["events"] if one["event"] == "evicted"]

            (event,) = evicted(await asking.until("events", evicted, "default"))
            assert (event["name"], event["sentence"]) == ("a:1", "admin at 127.0.0.1 evicted a:1: bad host")
            for other in ("a", "a:0"):
                problem = await orders.call("POST", order(other, "readmit"), 409, json={})
                assert problem["detail"] == f"{other} is neither banned nor evicted"
            assert [ban["target"] for ban in (await orders.call("GET", JOB))["bans"]] == ["a:1"]
            await orders.call("POST", order("a:1", "readmit"), 202, json={})
            trainers.append(Trainer(known.address, "a:1"))
            before = trainers[0].together
            await eventually(lambda: trainers[0].together > before)
            assert sorted(told.core.jobs["default"].groups) == NAMES
        finally:
            await asyncio.gather(*(one.stop() for one in trainers))
        assert trainers[0].ended is None
