"""PGTransport over real Gloo groups: the state of the step, in place, verified; and its ends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, distribute_tensor

from keepstep.checkpointing import PGTransport, TransferError, UnsupportedValue, pg_transport
from keepstep.process_group import ProcessGroupDummy
from keepstep.state.state_bytes import save_state
from keepstep_mesh.protocol.manifest import CHUNK_BYTES

MINUTE = timedelta(seconds=60)
CPU = torch.device("cpu")
SOON = timedelta(seconds=2)
"""Gloo sleeps so long over a message whose other end went away in the middle of it."""


def state_of(seed: int, mib: int) -> dict[str, Any]:
    """Tensors that fill several chunks, some that share one, and what is no tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weights": torch.randn(mib << 18, generator=generator),
        "small": [torch.full((100,), seed + i, dtype=torch.bfloat16) for i in range(50)],
        "step": seed,
        "name": "élan",
    }


def bits(state: Any) -> bytes:
    return save_state(state)[0]


def transport(group: Any, timeout: timedelta = MINUTE, **more: Any) -> PGTransport[Any]:
    return PGTransport(group, timeout, CPU, **more)


@pytest.mark.parametrize("mib", [0, 1, 8, 40])
def test_a_state_arrives_bit_for_bit(cohort: Callable[..., Any], mib: int):
    seen: list[tuple[int, int]] = []

    def take_part(group: Any, rank: int) -> Any:
        if rank == 0:
            return transport(group).send_checkpoint([1], 7, state_of(7, mib), MINUTE)
        return transport(group).recv_checkpoint(0, "", 7, MINUTE, progress=lambda *counts: seen.append(counts))

    received = cohort(2).each(take_part)[1]
    assert bits(received) == bits(state_of(7, mib))
    assert seen[-1][0] == seen[-1][1] >= mib << 20


@pytest.mark.parametrize("given", [True, False], ids=["into", "state_dict"])
def test_a_state_arrives_in_the_memory_that_it_is_for(cohort: Callable[..., Any], given: bool):
    into = state_of(0, 20)
    place = into["weights"].data_ptr()

    def take_part(group: Any, rank: int) -> Any:
        if rank == 0:
            return transport(group).send_checkpoint([1], 7, state_of(7, 20), MINUTE)
        if given:
            return transport(group).recv_checkpoint(0, "", 7, MINUTE, into=into)
        return transport(group, state_dict=lambda: into).recv_checkpoint(0, "", 7, MINUTE)

    received = cohort(2).each(take_part)[1]
    assert received["weights"].data_ptr() == place
    assert bits(received) == bits(state_of(7, 20))


def test_several_joiners_get_the_same_state(cohort: Callable[..., Any]):
    def take_part(group: Any, rank: int) -> Any:
        if rank == 1:
            return transport(group).send_checkpoint([0, 2, 3], 7, state_of(7, 20), MINUTE)
        return transport(group).recv_checkpoint(1, "", 7, MINUTE)

    received = cohort(4).each(take_part)
    assert {bits(one) for one in (received[0], *received[2:])} == {bits(state_of(7, 20))}


def test_a_transfer_and_a_collective_at_the_same_time_do_not_mix(cohort: Callable[..., Any]):
    """The source's next all-reduce may begin while a joiner still receives."""

    def take_part(group: Any, rank: int) -> Any:
        if rank == 0:
            transport(group).send_checkpoint([1], 7, state_of(7, 20), MINUTE)
        received = transport(group).recv_checkpoint(0, "", 7, MINUTE) if rank == 1 else None
        total = torch.full((4,), float(rank))
        group.allreduce([total]).wait()
        return received, total

    results = cohort(3).each(take_part)
    assert bits(results[1][0]) == bits(state_of(7, 20))
    assert all(total.equal(torch.full((4,), 3.0)) for _, total in results)


def test_another_step_than_the_one_asked_for_is_refused(cohort: Callable[..., Any]):
    def take_part(group: Any, rank: int) -> str:
        with pytest.raises(TransferError) as error:
            if rank == 0:
                transport(group).send_checkpoint([1], 6, state_of(6, 40), MINUTE)
            else:
                transport(group).recv_checkpoint(0, "", 7, MINUTE)
        assert group.errored() is not None
        return str(error.value)

    source, joiner = cohort(2, timeout=SOON).each(take_part)
    assert "step 6" in joiner
    assert "was not sent to all of [1]" in source


def test_a_joiner_is_told_at_once_that_the_source_has_nothing_to_send(cohort: Callable[..., Any]):
    def take_part(group: Any, rank: int) -> str:
        if rank == 0:
            source = transport(group)
            with pytest.raises(UnsupportedValue, match="state\\['what'\\]"):
                source.send_checkpoint([1], 7, {"what": object()}, MINUTE)
            source.refuse_checkpoint([1], 7, "it cannot be stored")
            return ""
        with pytest.raises(TransferError) as error:
            transport(group).recv_checkpoint(0, "", 7, MINUTE)
        return str(error.value)

    assert "the source cannot send its state" in cohort(2).each(take_part)[1]


class DamagingGroup:
    """Passes everything on, except one bit of the chunk with this number."""

    def __init__(self, group: Any, chunk: int) -> None:
        self._group = group
        self._left = chunk + 2  # the head and the manifest come before

    def send(self, tensors: list[torch.Tensor], rank: int) -> Any:
        self._left -= 1
        if self._left == -1:
            tensors = [tensors[0].clone()]
            tensors[0][1000] ^= 4
        return self._group.send(tensors, rank)

    def abort(self, reason: str | None = None) -> None:
        self._group.abort(reason)


def test_a_flipped_bit_is_found_and_what_it_was_received_into_counts_as_torn(cohort: Callable[..., Any]):
    def take_part(group: Any, rank: int) -> tuple[str, bool]:
        with pytest.raises(TransferError) as error:
            if rank == 0:
                damaging: Any = DamagingGroup(group, chunk=2)
                transport(damaging).send_checkpoint([1], 7, state_of(7, 64), MINUTE)
            else:
                transport(group).recv_checkpoint(0, "", 7, MINUTE, into=state_of(0, 64))
        return str(error.value), error.value.torn

    _, (joiner, torn) = cohort(2, timeout=SOON).each(take_part)
    assert "chunk 2 arrived damaged" in joiner
    assert torn


class TellingGroup:
    """Tells when it is received from."""

    def __init__(self, group: Any, received: threading.Event) -> None:
        self._group = group
        self._received = received
        self.abort = group.abort

    def recv(self, tensors: list[torch.Tensor], rank: int) -> Any:
        work = self._group.recv(tensors, rank)
        self._received.set()
        return work


def test_a_source_that_dies_in_the_middle_ends_the_heal_at_once(cohort: Callable[..., Any]):
    begun = threading.Event()

    def take_part(group: Any, rank: int) -> bool:
        if rank == 0:
            begun.wait(30)
            group.abort("killed")
            return True
        telling: Any = TellingGroup(group, begun)
        with pytest.raises(TransferError, match="was not received from rank 0"):
            transport(telling).recv_checkpoint(0, "", 7, MINUTE)
        return True

    assert cohort(2, timeout=SOON).each(take_part) == [True, True]


def test_a_joiner_that_never_takes_it_costs_the_source_its_timeout_and_no_more(cohort: Callable[..., Any]):
    over = threading.Event()

    def take_part(group: Any, rank: int) -> bool:
        if rank == 1:
            return over.wait(30)
        state = {"weights": torch.zeros(64 * CHUNK_BYTES // 4)}
        with pytest.raises(TimeoutError):
            transport(group).send_checkpoint([1], 7, state, timedelta(seconds=0.5))
        assert group.errored() is not None
        over.set()
        return True

    assert cohort(2, timeout=SOON).each(take_part) == [True, True]


def test_a_timeout_that_is_none_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        PGTransport(None, timedelta(0), CPU)  # type: ignore[arg-type]


def test_without_a_timeout_of_the_call_that_of_the_transport_limits_each_wait(cohort: Callable[..., Any]):
    over = threading.Event()

    def take_part(group: Any, rank: int) -> bool:
        if rank == 1:
            return over.wait(30)
        short = transport(group, timedelta(seconds=0.2))
        with pytest.raises(RuntimeError, match="timed out") as late:
            short.recv_checkpoint(1, "", 7)
        assert isinstance(late.value, TimeoutError)
        over.set()
        return True

    assert cohort(2).each(take_part) == [True, True]


@pytest.mark.parametrize("timeout", [MINUTE, timedelta(0)], ids=["longer", "that of the process group"])
def test_the_timeout_of_a_call_takes_the_place_of_that_of_the_transport(cohort: Callable[..., Any], timeout: timedelta):
    begun = threading.Event()

    def take_part(group: Any, rank: int) -> Any:
        short = transport(group, timedelta(milliseconds=1))
        if rank == 0:
            begun.wait(30)  # long after the millisecond
            return short.send_checkpoint([1], 7, state_of(7, 20), timeout)
        threading.Timer(0.1, begun.set).start()
        return short.recv_checkpoint(0, "", 7, timeout)

    assert bits(cohort(2).each(take_part)[1]) == bits(state_of(7, 20))


def test_the_timeout_of_a_call_limits_each_message_and_not_the_transfer(
    cohort: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """By the clock of the transport, each message takes an hour."""
    hours = itertools.count()
    monkeypatch.setattr(pg_transport, "time", SimpleNamespace(monotonic=lambda: 3600.0 * next(hours)))

    def take_part(group: Any, rank: int) -> Any:
        if rank == 0:
            return transport(group).send_checkpoint([1], 7, state_of(7, 40), MINUTE)
        return transport(group).recv_checkpoint(0, "", 7, MINUTE)

    assert bits(cohort(2).each(take_part)[1]) == bits(state_of(7, 40))


def test_a_limit_ends_a_transfer_before_the_timeout_of_a_message(cohort: Callable[..., Any]):
    over = threading.Event()

    def take_part(group: Any, rank: int) -> bool:
        if rank == 1:
            with pytest.raises(TimeoutError):
                transport(group).recv_checkpoint(0, "", 7, MINUTE, limit=timedelta(seconds=0.2))
            over.set()
        elif not over.wait(60):
            transport(group).send_checkpoint([1], 7, state_of(7, 1), MINUTE)
        return True

    assert cohort(2).each(take_part) == [True, True]


def test_a_dtensor_on_a_mesh_without_dimensions_arrives_also_in_a_rank_outside_of_it(cohort: Callable[..., Any]):
    """Such a mesh shards nothing. torch computes an empty shard for a rank that is not in it, and keeps the whole.

    The world is not one of torch's Gloo: a DTensor makes torch keep the world, sockets and all.
    """
    dist.Backend.register_backend("transport-world", lambda *_: ProcessGroupDummy(), devices=["cpu"])
    dist.init_process_group("transport-world", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if DeviceMesh("cpu", 0).get_coordinate() is None:
            pytest.skip("torch 2.9 gives no rank a coordinate in a mesh without dimensions: docs/dependencies.md")
        state = {
            name: distribute_tensor(torch.tensor([5, 6, 7]), DeviceMesh("cpu", rank), [])
            for name, rank in (("inside", 0), ("outside", 1))
        }

        def take_part(group: Any, rank: int) -> Any:
            if rank == 0:
                return transport(group).send_checkpoint([1], 7, state, MINUTE)
            return transport(group).recv_checkpoint(0, "", 7, MINUTE)

        received = cohort(2).each(take_part)[1]
        for name, sent in state.items():
            assert received[name].to_local().tolist() == [5, 6, 7]
            assert received[name].device_mesh == sent.device_mesh
            assert received[name].placements == ()
    finally:
        dist.destroy_process_group()
