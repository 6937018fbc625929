"""One backend of torch for several memberships: with a double of torch's backend, and with Gloo where torch has it.

torch's NCCL needs a GPU. Streams and events are replaced; docs/gpus.md has what a GPU shows.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

from keepstep.group.agreement import group_settings
from keepstep.group.quorum_plan import WorldSizeMode
from keepstep.process_group import ProcessGroupAbortedError, ProcessGroupError, ProcessGroupNCCL
from keepstep.process_group.torch_backends import membership_changes
from keepstep.process_group.torch_backends.backend import ProcessGroupShutDownError
from keepstep.process_group.torch_backends.membership_changes import (
    KeptBackend,
    MemberChange,
    MembershipStore,
    ReconfiguredCommunicator,
    chosen_change,
)
from keepstep_mesh.protocol.membership import difference
from tests.unit.keepstep.process_group.test_accelerator import Operation, stream  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("stream")
LIMIT = timedelta(seconds=20)
numbers = itertools.count(1)


class Double:
    """torch's contract, over the store that it was created with. Its members add the first elements of tensors."""

    def __init__(self, store: Store) -> None:
        self._store, self._name = store, f"double:{next(numbers)}"
        self._place, self._rank, self._size = "", 0, 0
        self._count = 0
        self.aborted = threading.Event()
        self.broken = ""

    def get_reconfigure_handle(self) -> str:
        return self._name

    def reconfigure(self, opts: Any) -> Operation:
        if self.broken:
            raise RuntimeError(self.broken)
        self._place, self._rank = f"members/{opts.uuid}", opts.handles.index(self._name)
        self._size, self._count = len(opts.handles), 0
        if self._rank == 0:
            assert self._store.compare_set(f"{self._place}/claimed", "", b"1") == b"1"
        return self.allreduce([torch.ones(1)], None)

    def allreduce(self, tensors: list[torch.Tensor], _options: object) -> Operation:
        self._count += 1
        place = f"{self._place}/{self._count}"
        self._store.set(f"{place}/{self._rank}", str(tensors[0][0].item()).encode())
        keys = [f"{place}/{rank}" for rank in range(self._size)]
        self._store.wait(keys, LIMIT)
        tensors[0][0] = sum(float(self._store.get(key)) for key in keys)
        return Operation()

    def abort(self) -> None:
        self.aborted.set()


def torchs_gloo(store: Store) -> Any:
    unique = next(numbers)  # Gloo's handles are those of different ranks
    gloo: Any = dist.ProcessGroupGloo
    return gloo(store, unique, unique + 1, LIMIT, enable_reconfigure=True)


needs_reconfigure = pytest.mark.skipif(not hasattr(dist.ProcessGroup, "reconfigure"), reason="needs torch >= 2.14")


class Members:
    """Two processes that become members again and again."""

    def __init__(self, create: Callable[[Store], Any]) -> None:
        self.created: list[list[Any]] = [[], []]
        self._kept = [KeptBackend(self._creating(create, made)) for made in self.created]
        self.present: list[ReconfiguredCommunicator | None] = [None, None]
        self._store = HashStore()
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(2)

    @staticmethod
    def _creating(create: Callable[[Store], Any], made: list[Any]) -> Callable[[Store], Any]:
        def creating(store: Store) -> Any:
            made.append(create(store))
            return made[-1]

        return creating

    def become(self, *members: int) -> list[BaseException | None]:
        place = PrefixStore(str(next(self._numbers)), self._store)

        def join(member: int, rank: int) -> None:
            self.end(member)
            mine = ReconfiguredCommunicator(self._kept[member], place, rank, len(members), LIMIT)
            self.present[member] = mine
            try:
                mine.connect()
            except Exception as error:
                mine.fail(error)
                raise

        joining = [self._threads.submit(join, member, rank) for rank, member in enumerate(members)]
        return [one.exception(60) for one in joining]

    def end(self, member: int) -> None:
        before, self.present[member] = self.present[member], None
        if before is not None:
            before.fail(ProcessGroupShutDownError("other members"))
            before.close()

    def sums(self, *members: int) -> list[float]:
        def run(member: int) -> float:
            tensor, mine = torch.tensor([2.0**member]), self.present[member]
            assert mine is not None
            mine.start("allreduce", ([tensor], dist.AllreduceOptions())).wait()
            return tensor.item()

        return [one.result(60) for one in [self._threads.submit(run, member) for member in members]]

    def close(self) -> None:
        for member, kept in enumerate(self._kept):
            self.end(member)
            kept.close()
        for made in self.created:
            made.clear()
        self._threads.shutdown()


@pytest.fixture(params=[Double, pytest.param(torchs_gloo, marks=needs_reconfigure)], ids=["double", "gloo"])
def members(request: pytest.FixtureRequest) -> Iterator[Members]:
    made = Members(request.param)
    yield made
    made.close()


def test_a_change_without_a_failure_keeps_the_backend(members: Members) -> None:
    for present in [(0, 1), (1,), (1, 0), (0, 1)]:
        assert members.become(*present) == [None] * len(present)
        assert members.sums(*present) == [sum(2.0**one for one in present)] * len(present)
    assert [len(made) for made in members.created] == [1, 1]


def test_an_abort_ends_the_backend_and_the_next_membership_has_a_new_one(members: Members) -> None:
    members.become(0, 1)
    mine = members.present[0]
    assert mine is not None
    mine.fail(ProcessGroupAbortedError("r1 was lost"))
    assert members.become(0, 1) == [None, None]
    assert members.sums(0, 1) == [3, 3]
    assert [len(made) for made in members.created] == [2, 1], "the other one knows of no failure"


def test_an_operation_in_flight_is_aborted_though_the_change_is_planned() -> None:
    members = Members(Double)
    members.become(0)
    mine = members.present[0]

    class InFlight:
        def is_completed(self) -> bool:
            return False

        def finish(self) -> None:
            """It releases its tensors."""

    operation = InFlight()
    assert mine is not None
    mine.started(operation)
    assert members.become(0) == [None]
    first, second = members.created[0]
    assert first.aborted.wait(60)
    assert not second.aborted.is_set()
    members.close()


def test_a_change_that_torch_refuses_is_an_error_and_the_next_one_begins_anew() -> None:
    members = Members(Double)
    members.become(0)
    members.created[0][0].broken = "no such communicator"
    (error,) = members.become(0)
    assert isinstance(error, ProcessGroupError)
    assert "torch could not change the members: no such communicator; if it never can, set " in str(error)
    assert "KEEPSTEP_NCCL_MEMBERS=rebuild in all groups" in str(error)
    assert members.become(0) == [None]
    members.close()


def test_a_thread_that_was_left_behind_does_not_get_the_backend_of_a_later_membership() -> None:
    kept = KeptBackend(Double)
    late, present = (ReconfiguredCommunicator(kept, HashStore(), 0, 1, LIMIT) for _ in range(2))
    with pytest.raises(ProcessGroupError, match="the membership is over"):
        kept.take(late, HashStore())
    assert isinstance(kept.take(present, HashStore()), Double)
    kept.close()


def test_a_backend_without_members_has_no_store() -> None:
    with pytest.raises(ProcessGroupError, match="no membership yet"):
        MembershipStore().check(["k"])


# ---- the choice


@pytest.mark.parametrize(
    ("has_class", "nccl", "variable", "chosen"),
    [
        (True, (2, 30, 1), None, MemberChange.TORCH),
        (True, (2, 30, 1), "auto", MemberChange.TORCH),
        (True, (2, 30, 1), "rebuild", MemberChange.REBUILD),
        (True, (2, 28, 9), None, MemberChange.REBUILD),
        (False, (2, 30, 1), None, MemberChange.REBUILD),
        (True, (2, 30, 1), "torch", MemberChange.TORCH),
        (False, (2, 30, 1), "torch", r"=torch needs ProcessGroupNCCL2 of torch >= 2\.14"),
        (True, (2, 28, 9), "torch", r"=torch needs NCCL >= 2\.29, not 2\.28\.9"),
        (True, (2, 30, 1), "shrink", "'shrink' must be one of auto, torch, rebuild"),
    ],
)
def test_torchs_own_change_is_chosen_where_torch_has_it(
    monkeypatch: pytest.MonkeyPatch, has_class: bool, nccl: tuple[int, ...], variable: str | None, chosen: Any
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", object if has_class else None, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    if variable is None:
        monkeypatch.delenv("KEEPSTEP_NCCL_MEMBERS", raising=False)
    else:
        monkeypatch.setenv("KEEPSTEP_NCCL_MEMBERS", variable)
    if isinstance(chosen, str) and not isinstance(chosen, MemberChange):
        with pytest.raises((ValueError, ProcessGroupError), match=chosen):
            chosen_change()
    else:
        assert chosen_change() is chosen


def test_torchs_change_is_not_chosen_with_rccl_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", object, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    monkeypatch.delenv("KEEPSTEP_NCCL_MEMBERS", raising=False)
    assert chosen_change() is MemberChange.REBUILD
    monkeypatch.setenv("KEEPSTEP_NCCL_MEMBERS", "torch")
    with pytest.raises(ProcessGroupError, match=r"=torch needs NVIDIA's NCCL: AMD's RCCL cannot"):
        chosen_change()


@pytest.mark.parametrize("takes_device", [True, False], ids=["torch 2.15", "torch 2.14"])
def test_torchs_backend_gets_the_device_of_its_thread(monkeypatch: pytest.MonkeyPatch, takes_device: bool) -> None:
    """torch 2.15 has an argument for it, torch 2.14 takes the device that is current; neither reads LOCAL_RANK here."""
    given: list[tuple[Any, ...]] = []

    class Options:
        pass

    class OfTorch:
        def __init__(self, *args: Any) -> None:
            if len(args) > 4 + takes_device:
                raise TypeError("__init__(): incompatible constructor arguments")
            given.append(args[3:])

    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("Old", (), {"Options": Options}), raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", OfTorch, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("KEEPSTEP_NCCL_MEMBERS", "torch")
    ProcessGroupNCCL()._create_kept(HashStore())
    ((options, *device),) = given
    assert options.enable_reconfigure
    assert device == ([torch.device("cuda", 3)] if takes_device else [])


def test_groups_that_change_their_members_in_different_ways_are_refused_by_name() -> None:
    settings = {
        "use_async_quorum": True,
        "world_size_mode": WorldSizeMode.DYNAMIC,
        "min_replica_size": 1,
        "init_sync": True,
        "refuse_nonfinite": False,
    }
    one = group_settings(**settings, process_group={membership_changes.SETTING: "torch"})  # type: ignore[arg-type]
    other = group_settings(**settings)  # type: ignore[arg-type]
    assert difference(one, "r0", other, "r1") == "setting nccl_members: torch in r0, unknown in r1"
