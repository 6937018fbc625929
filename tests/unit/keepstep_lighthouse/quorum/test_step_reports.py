"""The reactions of the lighthouse to the reports of groups about their last steps."""

from __future__ import annotations

import re
from itertools import permutations

import pytest

from keepstep_lighthouse.quorum.events import Decision, Tell
from keepstep_mesh.protocol.membership import StepReport
from keepstep_mesh.protocol.messages import Denied
from tests.support.models.core_driver import Driver, announced, announces, members


def running(*replica_ids: str) -> tuple[Driver, int]:
    """A job whose groups are in step 1 under the returned quorum."""
    driver = Driver(min_replicas=1)
    return driver, driver.start(*replica_ids).quorum_id


def denials(decisions: list[Decision], driver: Driver) -> dict[str, str]:
    told = [one for one in decisions if isinstance(one, Tell) and isinstance(one.message, Denied)]
    return {driver.replica_of[session]: one.message.code for one in told for session in one.to}


def ask_all(driver: Driver, quorum_id: int, collectives: dict[str, int], step: int = 0) -> list[Decision]:
    """All groups end the step: those with the fewest collectives committed it."""
    decisions: list[Decision] = []
    for replica_id, number in collectives.items():
        committed = number == min(collectives.values())
        report = StepReport(quorum_id, step, committed, number)
        failures = 0 if committed else 1
        decisions += driver.asks(replica_id, step + committed, failures=failures, last_step=report)
    return decisions


def differences(driver: Driver) -> list[tuple[set[str], str]]:
    """The groups that ended, and the reason, of each difference."""
    found = [entry.detail for entry in driver.log if entry.kind == "collectives_differ"]
    return [(set(one["ended"]), str(one["reason"])) for one in found]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("collectives", "ended"),
    [
        ({"r0": 4, "r1": 4, "r2": 5}, {"r2"}),
        ({"r0": 5, "r1": 5, "r2": 4}, {"r2"}),
        ({"r0": 4, "r1": 5}, {"r0", "r1"}),
    ],
)
def test_the_smaller_side_of_groups_with_different_numbers_of_collectives_ends_after_two_steps(collectives, ended):
    for order in permutations(collectives):
        driver, quorum_id = running(*collectives)
        numbers = {name: collectives[name] for name in order}
        first = ask_all(driver, quorum_id, numbers)
        assert not denials(first, driver)
        second = ask_all(driver, announced(first).quorum_id, numbers, step=1)
        assert denials(second, driver) == dict.fromkeys(ended, "collectives"), order
        assert [who for who, _ in differences(driver)] == [set(), ended]
        for _, reason in differences(driver):
            assert set(collectives) & set(re.findall(r"r\d", reason.split("completed")[1]))
            assert "completed it with 4" in reason
            assert "began 5" in reason


def test_a_single_difference_is_named_and_ends_no_group():
    driver, quorum_id = running("r0", "r1")
    for step in range(0, 6, 2):  # as a group that joins, and reduces a metric at another step than the others
        announce = announced(ask_all(driver, quorum_id, {"r0": 4, "r1": 5}, step))
        announce = announced(ask_all(driver, announce.quorum_id, {"r0": 4, "r1": 4}, step + 1))
        quorum_id = announce.quorum_id
    assert [who for who, _ in differences(driver)] == [set()] * 3


def test_the_others_go_on_as_soon_as_the_group_that_differed_has_left():
    driver, quorum_id = running("r0", "r1", "r2")
    first = ask_all(driver, quorum_id, {"r0": 4, "r1": 4, "r2": 5})
    ask_all(driver, announced(first).quorum_id, {"r0": 4, "r1": 4, "r2": 5}, step=1)
    decisions = driver.leaves("r2")
    assert members(announced(decisions)) == ["r0", "r1"]


def test_a_group_that_reports_after_the_next_quorum_is_still_compared():
    driver, quorum_id = running("r0", "r1", "r2")
    for name in ("r0", "r1"):
        driver.asks(name, 1, last_step=StepReport(quorum_id, 0, True, 4))
    driver.passes(driver.record.policy.join_timeout + 1)
    assert driver.record.members == ("r0", "r1")
    driver.asks("r2", 0, failures=1, last_step=StepReport(quorum_id, 0, False, 5))
    for name in ("r0", "r1"):
        driver.asks(name, 2, last_step=StepReport(quorum_id + 1, 1, True, 4))
    assert [reason.partition(", ")[2] for _, reason in differences(driver)] == [
        "r2 began 5; call manager.allreduce equally often in all groups"
    ]


@pytest.mark.parametrize("began", [0, 3, 4])
def test_a_step_that_failed_with_no_more_collectives_proves_nothing(began):
    driver, quorum_id = running("r0", "r1")
    driver.asks("r0", 1, last_step=StepReport(quorum_id, 0, True, 4))
    decisions = driver.asks("r1", 0, failures=1, last_step=StepReport(quorum_id, 0, False, began))
    assert announces(decisions)
    assert not differences(driver)


def ask_encoded(driver: Driver, quorum_id: int, quantized: dict[str, int], step: int = 0) -> list[Decision]:
    """All groups fail the step, after 2 collectives of which so many sent encoded values."""
    decisions: list[Decision] = []
    for replica_id, number in quantized.items():
        report = StepReport(quorum_id, step, False, 2, quantized=number)
        decisions += driver.asks(replica_id, step, failures=1, last_step=report)
    return decisions


@pytest.mark.parametrize(
    ("quantized", "ended"),
    [
        ({"r0": 2, "r1": 2, "r2": 0}, {"r2"}),
        ({"r0": 0, "r1": 2, "r2": 0}, {"r1"}),
        ({"r0": 2, "r1": 0}, {"r0", "r1"}),
    ],
)
def test_the_smaller_side_of_groups_of_which_only_some_quantize_ends_after_two_steps(quantized, ended):
    for order in permutations(quantized):
        driver, quorum_id = running(*quantized)
        numbers = {name: quantized[name] for name in order}
        first = ask_encoded(driver, quorum_id, numbers)
        assert not denials(first, driver)
        second = ask_encoded(driver, announced(first).quorum_id, numbers)
        assert denials(second, driver) == dict.fromkeys(ended, "collectives"), order
        assert [who for who, _ in differences(driver)] == [set(), ended]
        encoded, _, plain = differences(driver)[0][1].partition(" sent encoded values and ")
        assert set(re.findall(r"r\d", encoded)) == {name for name in quantized if quantized[name]}
        assert set(re.findall(r"r\d", plain.partition(" did not")[0])) == {n for n in quantized if not quantized[n]}


@pytest.mark.parametrize("quantized", [{"r0": 1, "r1": 0}, {"r0": 2, "r1": 1}, {"r0": 2, "r1": 2}, {"r0": 0, "r1": 0}])
def test_groups_that_fail_after_some_quantized_collectives_prove_nothing(quantized):
    driver, quorum_id = running(*quantized)
    for _ in range(3):
        quorum_id = announced(ask_encoded(driver, quorum_id, quantized)).quorum_id
    assert not differences(driver)


def nonfinite(driver: Driver) -> list[tuple[str, object]]:
    return [(entry.replica_id, entry.detail["step"]) for entry in driver.log if entry.kind == "nonfinite"]


def test_only_the_group_with_the_first_nan_is_named_and_every_contribution_is_counted():
    driver, quorum_id = running("r0", "r1", "r2")
    for step in range(1, 5):  # r1 contributes a NaN in step 2; all groups do from step 3 on
        for name in ("r0", "r2", "r1"):
            bad = step > 2 or (name, step) == ("r1", 2)
            driver.asks(name, step, last_step=StepReport(quorum_id, step - 1, True, 4, bad))
    assert nonfinite(driver) == [("r1", 2)]
    assert driver.core.tally.nonfinite == 1 + 3 + 3


def test_a_nan_after_finite_steps_is_named_again():
    driver, quorum_id = running("r0", "r1")
    for step, bad in ((1, True), (2, False), (3, True)):  # as the overflows of a GradScaler, which skips the step
        driver.asks("r0", step, last_step=StepReport(quorum_id, step - 1, True, 4, bad))
        driver.asks("r1", step, last_step=StepReport(quorum_id, step - 1, True, 4))
    assert nonfinite(driver) == [("r0", 1), ("r0", 3)]


def test_a_nan_in_a_step_that_comes_again_after_the_job_went_back_is_named_too():
    driver, quorum_id = running("r0", "r1")
    for step in (2, 3, 4):
        for name in ("r0", "r1"):
            driver.asks(name, step, quorum_id, last_step=StepReport(quorum_id, step - 1, True, 4, name == "r0"))
    for name in ("r0", "r1"):  # the script loads a state from before the first NaN
        driver.asks(name, 1, f"loaded:{quorum_id}", last_step=StepReport(quorum_id, 3, True, 4, name == "r0"))
    later = quorum_id + 1
    for step in (2, 3):
        for name in ("r0", "r1"):
            report = StepReport(later, step - 1, True, 4, (name, step) == ("r0", 3))
            driver.asks(name, step, f"resumed:{later}:{later}", last_step=report)
    assert nonfinite(driver) == [("r0", 2), ("r0", 3)]


def test_a_refused_nan_is_named_once_for_all_its_retries_and_once_for_each_request():
    driver, quorum_id = running("r0", "r1")
    for attempt in range(1, 4):
        for name in ("r0", "r1"):
            report = StepReport(quorum_id + attempt - 1, 0, False, 4, name == "r0")
            driver.asks(name, 0, failures=attempt, last_step=report)
    assert nonfinite(driver) == [("r0", 0)]
    driver.asks("r0", 0, failures=4, last_step=StepReport(quorum_id + 3, 0, False, 4))
    driver.asks("r1", 0, failures=4, last_step=StepReport(quorum_id + 3, 0, False, 4, True))
    driver.asks("r1", 0, failures=4, last_step=StepReport(quorum_id + 3, 0, False, 4, True))
    assert nonfinite(driver) == [("r0", 0), ("r1", 0)]


@pytest.mark.parametrize("committed", [True, False])
def test_a_step_counts_as_reported_when_a_collective_after_it_broke_the_process_group(committed: bool) -> None:
    driver, quorum_id = running("a", "b")
    for name in "ab":
        driver.asks(name, int(committed), failures=1, last_step=StepReport(quorum_id, 0, committed, 1))
    assert (driver.core.tally.committed, driver.core.tally.discarded) == ((2, 0) if committed else (0, 2))
