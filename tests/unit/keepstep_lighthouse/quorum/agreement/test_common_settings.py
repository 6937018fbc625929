"""Groups whose settings decide another arithmetic never train together; one that allows no heal decides for all."""

from __future__ import annotations

from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.messages import Denied
from tests.support.models.core_driver import Driver, announced, announces, members, told

ASYNC = "arithmetic 1\nuse_async_quorum True\nworld_size_mode DYNAMIC"
SYNC = "arithmetic 1\nuse_async_quorum False\nworld_size_mode DYNAMIC"


def denial(driver: Driver, decisions: list) -> Denied:
    """Return the denial, which is the only message."""
    ((message,),) = told(driver, decisions).values()
    assert isinstance(message, Denied)
    return message


def with_member_a(settings: str = ASYNC, info: MemberInfo | None = None) -> Driver:
    """``a`` is a member with these settings, and ``b`` is connected."""
    driver = Driver(min_replicas=1)
    driver.opens("a")
    assert announces(driver.asks("a", settings=settings, info=info))
    driver.opens("b")
    return driver


def test_a_group_with_other_settings_is_denied_with_the_first_difference_and_nobody_waits_for_it() -> None:
    driver = with_member_a()
    decisions = driver.asks("b", settings=SYNC)
    denied = denial(driver, decisions)
    assert denied.code == "layout"
    assert "setting use_async_quorum: False in b, True in a" in denied.reason
    assert members(announced(driver.asks("a", 1))) == ["a"]
    view = next(view for view in driver.core.replicas(driver.now) if view.replica_id == "b")
    assert view.reason is not None
    assert "use_async_quorum" in view.reason.sentence


def test_settings_are_compared_although_no_parameters_are_known_yet() -> None:
    driver = with_member_a()
    decisions = driver.asks("b", settings=SYNC, info=MemberInfo("http://b", layout="x"))
    assert denial(driver, decisions).reason.startswith("setting use_async_quorum")


def test_unknown_settings_fit_all_and_so_do_equal_ones() -> None:
    driver = Driver(min_replicas=3)
    driver.open_all("a", "b", "c")
    driver.asks("a", settings=ASYNC)
    driver.asks("b")
    assert members(announced(driver.asks("c", settings=ASYNC))) == ["a", "b", "c"]


def test_equal_settings_do_not_make_other_parameters_fit() -> None:
    driver = with_member_a(info=MemberInfo("http://a", layout="x"))
    decisions = driver.asks("b", settings=ASYNC, info=MemberInfo("http://b", layout="y"))
    denied = denial(driver, decisions)
    assert denied.peer_address == "http://a"
    assert "parameters" in denied.reason


def test_a_setting_that_only_one_of_two_versions_knows_is_a_difference() -> None:
    driver = with_member_a()
    denied = denial(driver, driver.asks("b", settings=f"{ASYNC}\nshould_quantize True"))
    assert "setting should_quantize: True in b, unknown in a" in denied.reason


def test_a_group_with_a_changed_setting_waits_until_the_groups_with_the_old_one_are_gone() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a:1", "b:1")
    driver.asks("a:1", settings=ASYNC)
    driver.asks("b:1", settings=ASYNC)
    driver.leaves("a:1")
    driver.opens("a:2")
    denied = denial(driver, driver.asks("a:2", settings=SYNC))
    assert "True in b; the job follows b" in denied.reason
    assert "restart all groups" in denied.reason
    driver.leaves("b:1")
    assert announces(driver.asks("a:2", settings=SYNC)), "the groups with the old setting are gone"
    driver.opens("b:2")
    driver.asks("b:2", settings=SYNC)
    assert members(announced(driver.asks("a:2", 1))) == ["a:2", "b:2"]


def test_the_settings_of_a_member_beat_those_of_who_asked_first_after_a_restart() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.restart()
    driver.opens("z")
    driver.asks("z", settings=SYNC)
    driver.open_all("a", "b")
    driver.asks("a", 1, settings=ASYNC)
    decisions = driver.asks("b", 1, settings=ASYNC)
    assert members(announced(decisions)) == ["a", "b"]
    assert "z" in told(driver, decisions)


def test_in_the_first_quorum_the_settings_of_the_majority_count() -> None:
    driver = Driver(min_replicas=3)
    driver.open_all("a", "b", "c")
    driver.asks("a", settings=SYNC)
    driver.asks("b", settings=ASYNC)
    reason = denial(driver, driver.asks("c", settings=ASYNC)).reason
    assert "setting use_async_quorum: False in a, True in b; the job follows b, c; give all groups the same" in reason


def test_two_groups_with_different_settings_are_both_refused_at_first() -> None:
    driver = Driver(min_replicas=2)
    driver.open_all("a", "b")
    driver.asks("a", settings=SYNC)
    decisions = driver.asks("b", settings=ASYNC)
    assert not announces(decisions)
    reasons = {who: message.reason for who, (message,) in told(driver, decisions).items()}  # type: ignore[union-attr]
    assert "False in a, True in b; no side has a majority (a against b), so all are refused" in reasons["a"]
    assert "True in b, False in a; no side has a majority (a against b), so all are refused" in reasons["b"]


def test_a_round_is_without_healing_for_all_when_one_member_allows_none() -> None:
    driver = Driver(min_replicas=1)
    assert driver.start("a", "b").allow_heal
    driver.asks("a", 1, allow_heal=False)
    mixed = announced(driver.asks("b", 0))
    assert not mixed.allow_heal
    assert not mixed.uniform
    assert (
        "no group heals because a asked for a round without healing"
        in driver.core.quorum_view(driver.now).reason.sentence
    )
    driver.asks("a", 2)
    assert announced(driver.asks("b", 1)).allow_heal, "the next round is decided again"


def test_steady_rounds_say_whether_healing_is_allowed_without_another_list() -> None:
    driver = Driver(min_replicas=2)
    driver.start("a", "b")
    driver.asks("a", 1, 1)
    before = announced(driver.asks("b", 1, 1))
    driver.asks("a", 2, 1, allow_heal=False)
    answer = announced(driver.asks("b", 2, 1))
    assert (answer.uniform, answer.version, answer.allow_heal) == (True, before.version, False)


def test_groups_heal_where_groups_finish_even_if_one_asked_for_a_round_without_healing() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.asks("a", 5, 1, final=True)
    last = announced(driver.asks("b", 3, "behind:b:1", allow_heal=False))
    assert (last.finishing, last.allow_heal) == (True, True)


def test_a_group_that_is_not_in_the_round_does_not_decide_on_its_healing() -> None:
    driver = Driver(min_replicas=1, max_replicas=1)
    driver.start("a")
    driver.opens("b")
    driver.asks("b", allow_heal=False)
    round_ = announced(driver.asks("a", 1))
    assert members(round_) == ["a"]
    assert round_.allow_heal
