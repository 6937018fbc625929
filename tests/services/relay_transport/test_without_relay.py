"""Several joiners of one source where no relay is known: each chunk leaves the source about once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from keepstep.state.errors import TransferError
from keepstep.transfer.direct import http_requests
from keepstep.transfer.relayed import relay_fetch
from tests.services.relay_transport.scene import CHUNK_MIB, DEADLINE, Groups, sent_by
from tests.support.checkpoints.checkpoint_ends import MIB, blank
from tests.support.checkpoints.checkpoint_peer import MINUTE, exchange

SIZE = 64
JOINERS = 4


class Joiners(Groups):
    """They all heal from ``s0``. ``together``: everybody waits until all have."""

    def __init__(self, *, together: bool = True, **how: Any) -> None:
        self.together = together
        super().__init__([], joiners=JOINERS, mib=SIZE, **how)

    def receive(self, number: int = 0, *, step: int = 1, url: str = "", timeout: timedelta = MINUTE, **how: Any) -> Any:
        names = [f"j{one}" for one in range(JOINERS)]
        told = replace(exchange(f"j{number}", ["s0"], names, step, beside=names), together=self.together)
        self.joiners[number].prepare(told)
        url = url or self.sources[0].metadata()
        return self.joiners[number].recv_checkpoint(0, url, step, timeout, into=blank(SIZE), limit=MINUTE, **how)


@pytest.fixture
def groups() -> Iterator[Joiners]:
    with Joiners() as made:
        yield made


@pytest.mark.parametrize("together", [True, False], ids=["before a step", "beside a step"])
async def test_joiners_take_most_of_it_from_each_other(together: bool) -> None:
    with Joiners(together=together, uplink=64 * MIB) as groups, sent_by(groups) as source:
        groups.stage()
        await groups.heal(url=source.url)
        assert source.passed < 2.5 * SIZE * MIB, "instead of 4 copies"
        assert "peers" in {one.via for one in groups.joiners}
        assert not any(one.direct.server._leases for one in groups.sources), "nothing is held for readers that are done"


async def test_one_that_nobody_can_reach_takes_and_all_heal(groups: Joiners, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups.joiners[1], "metadata", lambda: "http://127.0.0.1:1")
    groups.stage()
    await groups.heal()
    assert all(one.direct.server._find_chunk is None for one in groups.joiners), (
        "no joiner lends memory that is in use again"
    )


async def test_one_that_gives_up_in_the_middle_holds_up_nobody() -> None:
    with Joiners(uplink=32 * MIB) as groups:
        groups.stage()
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def progress(done: int, _total: int) -> None:
            if done:
                loop.call_soon_threadsafe(begun.set)

        ends = asyncio.create_task(groups.receiving(0, progress=progress))
        others = asyncio.create_task(groups.heal(1, 2, 3))
        await asyncio.wait_for(begun.wait(), DEADLINE)
        groups.joiners[0].abort_receive("no more")
        with pytest.raises(TransferError, match="no more"):
            await ends
        await others


async def test_when_the_source_is_lost_nobody_waits_for_it() -> None:
    with Joiners(uplink=8 * MIB) as groups:
        groups.stage()
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def progress(done: int, _total: int) -> None:
            if done:
                loop.call_soon_threadsafe(begun.set)

        receiving = [asyncio.create_task(groups.receiving(number, progress=progress)) for number in range(JOINERS)]
        await asyncio.wait_for(begun.wait(), DEADLINE)
        groups.sources[0].shutdown()
        for one in groups.joiners:
            one.source_lost("s0: its connection ended")
        async with asyncio.timeout(relay_fetch.LOST_ALONE_SECONDS + 10):
            for one in receiving:
                with pytest.raises(TransferError, match="s0: its connection ended"):
                    await one


async def test_a_source_of_an_older_version_serves_them_all_itself(
    groups: Joiners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses requests about other joiners, and sends nothing to those that wait."""
    line = http_requests.REQUEST_LINE.pattern.replace("|holders", "")
    monkeypatch.setattr(http_requests, "REQUEST_LINE", http_requests.re.compile(line))
    monkeypatch.setattr(http_requests, "QUEUE_FIELD", "X-Unknown")
    groups.stage()
    with sent_by(groups) as source:
        await groups.heal(url=source.url)
        assert source.passed > JOINERS * SIZE * MIB
    assert {one.via for one in groups.joiners} == {"direct"}


async def test_a_chunk_of_which_a_joiner_lies_is_taken_from_another(groups: Joiners) -> None:
    """Its memory was overwritten, say."""
    groups.stage()
    liar = groups.joiners[0].direct.server
    serve_chunks = liar.serve_chunks
    wrong = memoryview(bytes(CHUNK_MIB * MIB))
    lies: list[bytes] = []

    def lie(chunks: Any, digest: bytes) -> Any:
        if found := chunks(digest):
            lies.append(digest)
            return [wrong]
        return found

    liar.serve_chunks = lambda chunks: serve_chunks(None if chunks is None else lambda digest: lie(chunks, digest))
    await groups.heal()
    assert lies, "the others asked it for chunks, and healed"
