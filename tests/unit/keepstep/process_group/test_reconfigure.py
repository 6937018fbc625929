"""The same contract for both ways to change the members: ``configure`` with a store, and torch's ``reconfigure``."""

from __future__ import annotations

import concurrent.futures
import itertools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore

from keepstep.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupAbortedError,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupError,
    ProcessGroupGloo,
    ReconfigureOptions,
    reconfiguration,
    reconfigure_with_store,
)
from keepstep.process_group.baby.children import Spawner

LIMIT = timedelta(seconds=60)
SHORT = timedelta(seconds=1)

Change = Callable[[ProcessGroup, int, int, int, timedelta], None]
"""Makes a group rank r of n members of membership number m, within a limit."""


@pytest.fixture(scope="module", autouse=True)
def spawner() -> Iterator[None]:
    """Keep the spawner, whose start is slow, from test to test."""
    kept = Spawner.shared()
    kept.fork().discard()
    yield
    kept.release()


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the stores of the handles on loopback: torch asks the DNS for the name of each other address."""
    monkeypatch.setattr(reconfiguration, "outward_address", lambda: "127.0.0.1")


@pytest.fixture(params=[ProcessGroupGloo, ProcessGroupBabyGloo], ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[ProcessGroup]:
    return request.param


@pytest.fixture(params=["configure", "reconfigure"])
def change(request: pytest.FixtureRequest) -> Iterator[Change]:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{served.port}"

    def configure(group: ProcessGroup, rank: int, size: int, number: int, limit: timedelta) -> None:
        group.set_timeout(limit)
        group.configure(f"{address}/{number}", f"r{rank}", rank, size, number)

    def reconfigure(group: ProcessGroup, rank: int, size: int, number: int, limit: timedelta) -> None:
        reconfigure_with_store(group, f"{address}/{number}", rank, size, limit)

    yield {"configure": configure, "reconfigure": reconfigure}[request.param]
    del served


class Members:
    """Process groups in one process, each in a thread of its own."""

    def __init__(self, kind: type[ProcessGroup], change: Change, count: int) -> None:
        self.groups = [kind(timeout=LIMIT) for _ in range(count)]  # type: ignore[call-arg]
        self._change = change
        self._numbers = itertools.count(1)
        self._threads = concurrent.futures.ThreadPoolExecutor(count)

    def become(self, *members: int, present: tuple[int, ...] | None = None, limit: timedelta = LIMIT) -> list[Any]:
        """Make these groups the members, in this order; return the errors of those that are present."""
        number = next(self._numbers)
        changing = [
            self._threads.submit(self._change, self.groups[member], rank, len(members), number, limit)
            for rank, member in enumerate(members)
            if present is None or member in present
        ]
        return [one.exception(60) for one in changing]

    def sums(self, *members: int) -> list[float]:
        """All-reduce 1, 2, 4 ... over these members; return what each of them has."""

        def run(member: int) -> float:
            tensor = torch.tensor([2.0**member])
            self.groups[member].allreduce([tensor]).wait()
            return tensor.item()

        return [one.result(60) for one in [self._threads.submit(run, member) for member in members]]

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()
        self._threads.shutdown()


@pytest.fixture
def members(kind: type[ProcessGroup], change: Change) -> Iterator[Members]:
    made = Members(kind, change, 4)
    yield made
    made.close()


def test_members_shrink_grow_reorder_and_merge(members) -> None:
    for present in [(0, 1, 2), (2, 0), (1, 2, 0), (3,), (0, 1, 2, 3)]:
        assert members.become(*present) == [None] * len(present)
        assert members.sums(*present) == [sum(2.0**one for one in present)] * len(present)
        assert [members.groups[one].rank() for one in present] == list(range(len(present)))
        assert {members.groups[one].size() for one in present} == {len(present)}


def test_a_group_that_was_aborted_or_timed_out_can_become_a_member_again(members) -> None:
    members.become(0, 1)
    work = members.groups[0].allreduce([torch.ones(1)])
    members.groups[0].abort("member lost")
    with pytest.raises(ProcessGroupAbortedError, match="member lost"):
        work.wait()
    assert members.become(0, 1) == [None, None]
    members.groups[0].set_timeout(SHORT)
    with pytest.raises(TimeoutError):
        members.groups[0].allreduce([torch.ones(1)]).wait()
    assert members.become(0, 1) == [None, None]
    assert members.sums(0, 1) == [3, 3]


def test_a_missing_peer_is_an_error_by_the_deadline_and_a_late_one_joins_the_next_membership(members) -> None:
    begun = time.monotonic()
    (error,) = members.become(0, 1, present=(0,), limit=SHORT)
    assert isinstance(error, TimeoutError | dist.DistError | ProcessGroupError)
    assert time.monotonic() - begun < 30
    assert members.become(0, 1) == [None, None]
    assert members.sums(0, 1) == [3, 3]


# ---- torch's contract alone


def options(number: int, *handles: str, limit: timedelta | None = None) -> ReconfigureOptions:
    made = ReconfigureOptions()
    made.uuid, made.handles = number, list(handles)
    if limit is not None:
        made.timeout = limit
    return made


@pytest.fixture
def group() -> Iterator[ProcessGroupGloo]:
    made = ProcessGroupGloo(LIMIT)
    yield made
    made.shutdown()


def test_a_used_uuid_is_refused_also_after_a_failure(group) -> None:
    handle = group.get_reconfigure_handle()
    assert handle == group.get_reconfigure_handle()
    assert group.reconfigure(options(7, handle)).wait()
    with pytest.raises(ValueError, match="uuid 7 was used before"):
        group.reconfigure(options(7, handle))
    other = ProcessGroupGloo()
    missing = other.get_reconfigure_handle()
    with pytest.raises(TimeoutError):
        group.reconfigure(options(8, handle, missing, limit=timedelta(milliseconds=300)))
    with pytest.raises(ValueError, match="uuid 8 was used before"):
        group.reconfigure(options(8, handle))
    assert group.reconfigure(options(9, handle)).wait()
    other.shutdown()


@pytest.mark.parametrize(
    ("handles", "error", "reason"),
    [
        ([], ValueError, "not among the 0 handles"),
        (["nonsense"], ValueError, "invalid reconfigure handle"),
        (["{}"], ValueError, "invalid reconfigure handle"),
        ({"a"}, TypeError, "expected a list, in order"),
    ],
)
def test_an_invalid_membership_is_named(group, handles, error, reason) -> None:
    wrong = options(1)
    wrong.handles = handles
    with pytest.raises(error, match=reason):
        group.reconfigure(wrong)


def test_the_limit_of_a_reconfiguration_is_not_that_of_later_operations(group) -> None:
    group.reconfigure(options(1, group.get_reconfigure_handle(), limit=SHORT))
    assert group._timeout == LIMIT


def test_a_wrapper_has_the_contract_of_its_group_and_a_managed_group_has_none(group) -> None:
    wrapper = ErrorSwallowingProcessGroupWrapper(group)
    assert wrapper.supports_reconfigure
    wrapper.report_error(ProcessGroupError("lost"))
    assert wrapper.reconfigure(options(1, wrapper.get_reconfigure_handle())).wait()
    assert wrapper.errored() is None
    assert not ManagedProcessGroup(object()).supports_reconfigure  # type: ignore[arg-type]
    dummy = ProcessGroupDummy()
    assert dummy.reconfigure(options(1, dummy.get_reconfigure_handle())).wait()
    with pytest.raises(ValueError, match="expected 1 in a dummy group"):
        dummy.reconfigure(options(2, "a", "b"))
    dummy.shutdown()


def test_a_store_of_somebody_else_can_carry_the_exchange(kind) -> None:
    from keepstep.process_group.store_exchange import reconfigure_over

    groups = [kind(timeout=LIMIT) for _ in range(2)]  # type: ignore[call-arg]
    store = PrefixStore("exchange", HashStore())
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for number in (5, 6):
            changing = [
                threads.submit(reconfigure_over, one, PrefixStore(str(number), store), rank, 2, LIMIT, uuid=number)
                for rank, one in enumerate(groups)
            ]
            assert [one.result(60) for one in changing] == [None, None]
    assert [one.size() for one in groups] == [2, 2]
    for one in groups:
        one.shutdown()


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "reconfigure"), reason="needs torch >= 2.14")
def test_torchs_own_gloo_has_the_contract() -> None:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=served, rank=0, world_size=1, enable_reconfigure=True)
    try:
        world: Any = dist.group.WORLD
        reconfigure_with_store(world, f"127.0.0.1:{served.port}/1", 0, 1, LIMIT)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 1
    finally:
        dist.destroy_process_group()
