"""Knowledge that the engine of ``keepstep chaos`` takes from the lighthouse."""

from __future__ import annotations

from aiohttp import web
from aiohttp.test_utils import TestServer

from keepstep_chaos.engine import Duration, Engine
from keepstep_chaos.injecting.elsewhere import parse
from keepstep_chaos.observing.targets import Place, Places
from keepstep_chaos.recovery import Recovery
from keepstep_chaos.schedule import Limits, Schedule
from keepstep_chaos.vocabulary import KINDS, Fault, Role, Target
from keepstep_cli.asking.rest import Lighthouse

GROUP = Target(Role.GROUP, "r0")


def test_a_group_that_comes_back_as_a_spare_has_recovered(tmp_path):
    places = Places("job")
    places.add(Place(GROUP, []))
    recovery = Recovery([GROUP], 0, began=0.0)
    schedule = Schedule(0, [GROUP], {GROUP: ["kill"]}, Limits(min_groups=0))
    engine = Engine(places, schedule, recovery, Lighthouse("http://127.0.0.1:1", None), [], tmp_path, print)

    kill = Fault(1, KINDS["kill"], GROUP, 0.0)
    recovery.begin(kill, 10.0)
    recovery.end(kill, 11.0)
    engine.learn({"replicas": [{"replica_id": "r0:a", "state": "suspect"}]}, 12.0)
    assert recovery.down == {GROUP}
    engine.learn({"replicas": [{"replica_id": "r0:b", "state": "spare"}]}, 13.0)
    assert not recovery.down


async def test_a_service_that_this_machine_could_not_reach_before_its_fault_is_not_judged_by_answers(tmp_path):
    hidden, open_one = Target(Role.RELAY, "relay:29520"), Target(Role.METRICS, "metrics:29530")
    async with TestServer(web.Application()) as server:
        places = Places("job")
        places.add(Place(hidden, [], url="http://127.0.0.1:1", elsewhere=True))
        places.add(Place(open_one, [], url=str(server.make_url("")).rstrip("/"), elsewhere=True))
        recovery = Recovery(places.targets, 1, began=0.0)
        schedule = Schedule(0, places.targets, {hidden: ["kill"], open_one: []}, Limits(min_groups=0))
        lighthouse = Lighthouse("http://127.0.0.1:1", None)
        templates = parse(["kill=true"])
        engine = Engine(places, schedule, recovery, lighthouse, [], tmp_path, print, templates)
        await engine.run(Duration(seconds=0.0, faults=1, wedge_seconds=0.05))
    assert recovery.unseen == {hidden}
    assert not recovery.down
