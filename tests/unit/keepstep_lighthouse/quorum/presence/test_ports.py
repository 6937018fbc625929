"""When a refused connection proves that a group is dead; ``43_closed_port.txt`` has the usual course of events."""

from __future__ import annotations

import pytest

from keepstep_lighthouse.quorum.events import Closed, Decision, FindPort, ProbePort
from keepstep_lighthouse.quorum.presence import ports
from keepstep_lighthouse.quorum.views.replicas import ReplicaState
from keepstep_mesh.protocol.membership import HeldAnswer, MemberInfo
from tests.support.models.core_driver import Driver, logged, states

HOST = "10.0.0.1"


def info(port: int = 4000) -> MemberInfo:
    return MemberInfo(f"http://r:{port}")


def found(decisions: list[Decision]) -> list[FindPort | ProbePort]:
    return [one for one in decisions if isinstance(one, FindPort | ProbePort)]


def two_groups(host: str = HOST) -> Driver:
    """Groups a:1 and b:1 that train together; b:1 has answered at its port."""
    driver = Driver(min_replicas=1)
    for one in ("a:1", "b:1"):
        driver.opens(one, host=host)
    for one in ("a:1", "b:1"):
        driver.asks(one, info=info())
    driver.port_answers("b:1")
    return driver


def test_a_refusal_of_a_group_that_never_answered_proves_nothing() -> None:
    driver = two_groups()
    assert found(driver.closes("a:1")) == []
    assert driver.port_refuses("a:1") == []
    assert states(driver)["a:1"] is ReplicaState.SUSPECT


def test_only_an_incarnation_with_a_known_host_and_port_is_looked_for() -> None:
    driver = Driver(min_replicas=1)
    driver.opens("a", host=HOST)
    driver.opens("b:1", host="")
    driver.opens("c:1", host=HOST)
    driver.opens("d:1", host=HOST)
    assert found(driver.asks("a", info=info())) == [], "its next process has the same name"
    assert found(driver.asks("b:1", info=info())) == []
    for address in ("", "http://r", "http://r:99999", "http://[r:1"):
        assert found(driver.asks("c:1", info=MemberInfo(address))) == []
    assert found(driver.asks("d:1", info=info())) == [FindPort(4, "d:1", HOST, 4000)]


def test_a_group_is_looked_for_once_a_session_and_again_at_another_port() -> None:
    driver = two_groups()
    assert found(driver.asks("b:1", 1, info=info())) == []
    assert found(driver.asks("b:1", 1, info=info(4001))) == [FindPort(2, "b:1", HOST, 4001)]
    assert found(driver.closes("b:1")) == [], "it has not answered at the new port"


def test_a_refusal_that_belongs_to_an_earlier_session_proves_nothing() -> None:
    driver = two_groups()
    driver.closes("b:1")
    driver.opens("b:1", held=HeldAnswer(1, 1, 0), host=HOST)
    driver.asks("b:1", 1, info=info())
    driver.port_answers("b:1")
    driver.closes("b:1")
    assert driver.port_refuses("b:1", session=2) == []
    assert logged(driver.port_refuses("b:1", session=3)) == [("lost", "b:1")]
    assert driver.port_refuses("b:1", session=3) == [], "it is lost already"


def test_no_port_is_probed_during_a_takeover() -> None:
    driver = two_groups()
    driver.restart()
    driver.opens("b:1", seen=1, host=HOST)
    driver.asks("b:1", info=info())
    driver.port_answers("b:1")
    assert found(driver.closes("b:1")) == []
    assert driver.port_refuses("b:1") == []


def test_a_group_that_left_or_failed_is_not_probed() -> None:
    driver = two_groups()
    session = driver.session_of["b:1"]
    driver.leaves("b:1")
    assert driver.feed(Closed(session)) == []


def test_the_groups_that_may_return_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "MAX_REMEMBERED", 2)
    driver = two_groups()
    for number in range(2, 6):
        driver.closes(f"b:{number - 1}")
        driver.port_refuses(f"b:{number - 1}")
        driver.opens(f"b:{number}", host=HOST)
        driver.asks(f"b:{number}", info=info())
        driver.port_answers(f"b:{number}")
    assert list(driver.core._features.ports.lost) == ["b:3", "b:4"]
    assert ("port_misled", "b:1") not in logged(driver.opens("b:1", host=HOST)), "forgotten"
    assert ("port_misled", "b:4") in logged(driver.opens("b:4", host=HOST))
