"""Size of the values that a rebuild stores at the rendezvous: its growth with the world, and its limit."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from datetime import timedelta

import aiohttp
import msgpack
import pytest
import torch
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep.process_group import ProcessGroupDummy, ProcessGroupGloo, ProcessGroupWrapper
from keepstep.process_group.torch_backends.gloo import SHORT_ADDRESSES, lengthened, shortened
from keepstep.rendezvous import key_value_server
from keepstep.rendezvous.store_client import KeyValueServer, RendezvousError, RendezvousStore, Table
from keepstep.step.reconfigurer import Reconfigurer
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.membership import Member, MemberInfo
from keepstep_mesh.protocol.messages import Quorum

OWN = "http://127.0.0.1:1"
NEW = Table("job", 1, 7, 0)


@pytest.fixture
def server() -> Iterator[KeyValueServer]:
    server = KeyValueServer()
    yield server
    server.close()


def published(numbers: tuple[int, ...], name: bytes = b"host") -> bytes:
    """As Gloo has it: host name and socket address, their lengths before them, then the numbers."""
    head = struct.pack("=Q", len(name)) + name + struct.pack("=Q", 136) + b"\1" * 136
    return head + struct.pack(f"={len(numbers)}q", *numbers)


# ---- addresses


@given(st.binary(max_size=64), st.integers(1, 40))
def test_numbers_that_only_count_are_left_out_and_put_back(name: bytes, size: int) -> None:
    whole = published(tuple(range(size)), name)
    short = shortened(whole, size)
    assert len(short) == len(whole) - 8 * size + 8
    assert lengthened(short, size) == whole


@given(st.lists(st.integers(-1, 5), max_size=6).map(tuple), st.integers(1, 6))
def test_an_address_that_is_of_another_kind_stays_as_it_is(numbers: tuple[int, ...], size: int) -> None:
    whole = published(numbers)
    if numbers[-size:] != tuple(range(size)):
        assert shortened(whole, size) == whole
    assert lengthened(whole, size) == whole
    assert lengthened(shortened(whole, size), size) == whole


def test_the_bytes_that_a_member_stores_do_not_grow_with_the_world(cohort) -> None:
    sizes = set()
    for size in (2, 8):
        one = cohort(size)
        (table,) = one.server._tables.values()
        assert len(table.values) == size
        sizes |= {len(value) for value in table.values.values()}
        limit = size * ProcessGroupGloo().rendezvous_bytes(size, key_value_server.VERSION)
        assert limit / 2 < table.size <= limit
        sums = one.each(lambda group, rank: group.allreduce([torch.ones(3) * (rank + 1)]).wait())
        assert sums == [True] * size
    assert len(sizes) == 1


@pytest.mark.parametrize("newer", [0, 1, 2])
def test_whole_and_short_addresses_are_both_read(cohort, newer: int) -> None:
    versions = [SHORT_ADDRESSES] * newer + [1] * (2 - newer)
    one = cohort(2, configured=False)
    one.each(
        lambda group, rank: group.configure(
            "", f"r{rank}", rank, 2, 1, store=RendezvousStore(OWN, NEW, server=one.server, version=versions[rank])
        )
    )
    (table,) = one.server._tables.values()
    assert sum(value.startswith(b"\xff" * 8) for value in table.values.values()) == newer
    assert table.size <= 2 * ProcessGroupGloo().rendezvous_bytes(2, 1)


# ---- the limit of a rebuild


def plan_of(count: int, replica_id: str = "g00000", *, versions: tuple[int, ...] = ()) -> QuorumPlan:
    members = tuple(
        Member(f"g{number:05}", 0, 0, 0, False, MemberInfo(OWN, OWN, rendezvous=version))
        for number, version in enumerate((*versions, *[key_value_server.VERSION] * (count - len(versions))))
    )
    return make_plan(Quorum(0, 1, 7, 0, 0, 0, 0, 0, uniform=True, listed=members), replica_id)


def reconfigurer(server: KeyValueServer, pg: torch.distributed.ProcessGroup, ranks: int) -> Reconfigurer:
    return Reconfigurer(
        pg,
        job="job",
        replica_id="g00000",
        group_rank=0,
        group_world_size=ranks,
        token=None,
        host="127.0.0.1",
        key_values=server,
        own_address=OWN,
        timeout=timedelta(seconds=60),
    )


@pytest.mark.parametrize("wrap", [lambda pg: pg, ProcessGroupWrapper])
async def test_a_world_that_the_rendezvous_cannot_hold_is_refused_before_anybody_waits(server, wrap) -> None:
    builder = reconfigurer(server, wrap(ProcessGroupGloo()), ranks=8)
    with pytest.raises(
        KeepstepError,
        match=r"1100 groups of 8 ranks need 80\.\d MB at the rendezvous of a rebuild \(limit: 67\.1 MB\).*"
        r"g00001 runs an older keepstep.* update it",
    ):
        await asyncio.wait_for(builder.follow(plan_of(1100, versions=(2, 1))), 60)
    with pytest.raises(KeepstepError, match=r"30000 groups of 8 ranks need .* use fewer groups or fewer ranks"):
        await asyncio.wait_for(builder.follow(plan_of(30_000)), 60)
    assert not server._tables
    assert builder.broken
    builder.shutdown()


def test_1024_groups_of_8_ranks_fit() -> None:
    need = 1024 * 8 * ProcessGroupGloo().rendezvous_bytes(1024, key_value_server.VERSION)
    assert need < key_value_server.MAX_TOTAL_BYTES / 10


async def test_a_process_group_that_stores_nothing_has_no_limit(server) -> None:
    builder = reconfigurer(server, ProcessGroupDummy(), ranks=8)
    assert await asyncio.wait_for(builder.follow(plan_of(30_000)), 60)
    builder.shutdown()


@pytest.mark.parametrize(("versions", "short"), [((1, 2), False), ((2, 1), False), ((2, 2), True), ((2, 3), True)])
async def test_addresses_are_short_when_every_member_can_read_them(
    server, versions: tuple[int, int], short: bool
) -> None:
    builders = [reconfigurer(server, ProcessGroupGloo(), ranks=1) for _ in versions]
    plans = [plan_of(2, f"g0000{rank}", versions=versions) for rank in range(2)]
    both = [builder.follow(plan) for builder, plan in zip(builders, plans, strict=True)]
    assert await asyncio.wait_for(asyncio.gather(*both), 30) == [True, True]
    (table,) = server._tables.values()
    assert [value.startswith(b"\xff" * 8) for value in table.values.values()] == [short] * 2
    for builder in builders:
        builder.shutdown()


# ---- what a peer can make the table hold


def test_keys_count_and_have_a_limit(server, monkeypatch) -> None:
    longest = "k" * key_value_server.MAX_KEY_CHARACTERS
    server.set(NEW, longest, b"")
    with pytest.raises(RendezvousError, match=r"key too long: 1025 characters \(limit 1024\)"):
        server.set(NEW, longest + "k", b"")
    with pytest.raises(RendezvousError, match=r"key too long: 1025 characters \(limit 1024\)"):
        server.wait(NEW, ["short", longest + "k"])
    monkeypatch.setattr(key_value_server, "MAX_TOTAL_BYTES", 10_000)
    with pytest.raises(RendezvousError, match="full: it stores up to 10000 bytes"):
        for number in range(20):
            server.set(NEW, f"{number:1000}", b"")
    assert len(server._tables[NEW].values) < 10


async def test_a_long_name_of_a_job_is_refused(server) -> None:
    app = web.Application()
    app.add_routes(server.routes())
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}{key_value_server.PATH}"
    try:
        async with aiohttp.ClientSession() as session:
            for length, status in ((1024, 200), (1025, 400)):
                body = msgpack.packb(["j" * length, 1, 7, 0, "set", "key", b""])
                async with session.post(url, data=body) as answer:
                    assert answer.status == status
                    assert (b"job name too long: 1025 characters" in await answer.read()) == (status == 400)
    finally:
        await runner.cleanup()


def test_the_tables_of_quorums_that_are_over_are_dropped_when_the_group_moves_on(server) -> None:
    tables = {quorum_id: Table("job", 2, quorum_id, 0) for quorum_id in (6, 7)}
    other = Table("other", 1, 1, 0)
    for table in (tables[6], other):
        server.set(table, "key", b"value")
    waiting = server.wait(tables[6], ["never"])
    server.drop_before("job", 2, 6)
    assert not waiting.done()
    server.drop_before("job", 2, 7)
    with pytest.raises(RendezvousError, match="quorum 6 of job 'job' is over: quorum 7 has replaced it"):
        waiting.result(0)
    assert list(server._tables) == [other]
    server.set(tables[7], "key", b"value")
    server.drop_before("job", 2, 7)
    assert server.check(tables[7], ["key"])
