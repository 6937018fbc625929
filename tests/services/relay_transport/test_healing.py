"""Live state goes through the relay: up once, by all sources together; down about once, however many joiners."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from datetime import timedelta

import pytest

from keepstep.checkpointing import TransferError
from tests.services.relay_transport.scene import CHUNK_MIB, Groups, before, held, received_mib, relay, sent_by, sent_mib
from tests.support.checkpoints.checkpoint_ends import MIB, peer, same
from tests.support.checkpoints.checkpoint_peer import state_of
from tests.support.network.certificates import Authority


async def test_one_joiner_heals_through_the_relay_and_the_source_serves_its_manifest_only(patient):
    async with relay() as url:
        with Groups([url], mib=64) as groups, sent_by(groups) as source:
            groups.stage()
            await groups.heal(url=source.url)
            assert source.passed < MIB
            assert groups.joiners[0].via == "relay"
            await groups.uploaded(url)
            assert await received_mib(url) == pytest.approx(64, abs=0.1)
            assert await sent_mib(url) == pytest.approx(64, abs=0.1)


async def test_three_sources_upload_each_chunk_about_once():
    async with relay() as url:
        with Groups([url], sources=3, mib=96) as groups:
            groups.stage()
            await groups.heal()
            await groups.uploaded(url)
            assert await received_mib(url) < 2 * 96


@pytest.mark.parametrize("joiners", [2, 6])
async def test_joiners_bring_each_other_what_the_relay_sent_to_one(joiners, patient):
    """The upload takes long enough for all of them to be there from its beginning."""
    async with relay() as url:
        with Groups([url], joiners=joiners, mib=96, uplink=64 * MIB) as groups, sent_by(groups) as source:
            groups.stage()
            await groups.heal(url=source.url)
            assert await sent_mib(url) <= (1 + joiners) / 2 * 96
            assert source.passed < joiners * MIB


async def test_each_joiner_says_that_it_has_all_before_it_goes_so_that_nobody_serves_on_for_nothing():
    async with relay() as url:
        with Groups([url], joiners=3, mib=64) as groups:
            groups.stage()
            await groups.heal()
            all_of_it = 64 // CHUNK_MIB + 1  # the rest of the state is a little more
            assert await held(url, chunks=all_of_it) == [all_of_it] * 3


async def test_equal_chunks_go_up_once_and_peers_that_have_one_of_them_are_asked():
    async with relay() as url:
        with Groups([url], joiners=2, mib=64) as groups:
            state = state_of(1, 64)
            state["user"]["model"]["weights"].zero_()
            groups.stage(state=state)
            for got in await asyncio.gather(groups.receiving(0), groups.receiving(1)):
                assert same(got, state)
            await groups.uploaded(url)
            assert await received_mib(url) <= 2 * CHUNK_MIB


async def test_a_state_without_a_tensor_heals():
    async with relay() as url:
        with Groups([url], joiners=2) as groups:
            groups.stage(state={"step": 1})
            assert await asyncio.gather(groups.receiving(0), groups.receiving(1)) == [{"step": 1}] * 2


async def test_step_after_step_goes_through_the_relay():
    async with relay() as url:
        with Groups([url], sources=2, joiners=2) as groups:
            for step in range(1, 6):
                groups.stage(step=step)
                await groups.heal(step=step)
            assert await sent_mib(url) >= 5 * 32


async def test_without_a_relay_the_source_sends_all_of_it():
    with Groups([]) as groups, sent_by(groups) as source:
        assert not groups.sources[0].needs_all_sources
        groups.stage()
        await groups.heal(url=source.url)
        assert source.passed > 32 * MIB
        assert groups.joiners[0].via == "direct"


async def test_a_fast_joiner_does_not_wait_for_a_slow_one():
    """0.1 MB a second goes to the slow one and comes from it; the fast one needs chunks that it is to bring."""
    async with relay() as url:
        with Groups([url], joiners=2, mib=128) as groups, ExitStack() as stack:
            groups.stage()
            await groups.uploaded(url)
            slow_relay, slow_source, to_fast, to_slow = (
                stack.enter_context(before(one, slowly))
                for one in (url, groups.sources[0].metadata(), *(joiner.metadata() for joiner in groups.joiners))
            )
            groups.joiners[0].metadata, groups.joiners[1].metadata = lambda: to_fast.url, lambda: to_slow.url
            groups.joiners[1]._relays = lambda: [slow_relay.url]
            slow = asyncio.create_task(groups.receiving(1, url=slow_source.url))
            await groups.heal(0)
            assert to_slow.passed < CHUNK_MIB * MIB, "it does not wait until a chunk is here"
            assert not slow.done()
            groups.joiners[1].abort_receive("it would take 20 minutes")
            with pytest.raises(TransferError, match="20 minutes"):
                await slow


def slowly(_number, _so_far, data):
    time.sleep(len(data) / 1e5)  # a network of 0.1 MB/s
    return data


async def test_two_relays_have_a_part_each(patient):
    async with relay() as one, relay() as other:
        with Groups([one, other], sources=2, joiners=2, mib=128) as groups, sent_by(groups) as source:
            groups.stage()
            await groups.heal(url=source.url)
            assert source.passed < 2 * MIB
            for url in (one, other):
                assert 0 < await received_mib(url) < 128
                await groups.uploaded(url, state="part")


async def test_the_parts_of_a_state_outlast_the_time_limit_of_uploads(patient):
    async with relay("--upload-timeout", "1") as one, relay("--upload-timeout", "1") as other:
        with Groups([one, other], mib=64) as groups, sent_by(groups) as source:
            groups.stage()
            for url in (one, other):
                await groups.uploaded(url, state="part")
            await asyncio.sleep(1.5)  # by then an upload would be over; no event reports that a part goes on
            await groups.heal(url=source.url)
            assert groups.joiners[0].via == "relay"
            assert source.passed < MIB


async def test_a_relay_that_wants_tokens_and_mutual_tls_gets_them(tmp_path, patient):
    authority = Authority(tmp_path)
    service = authority.service(mutual=True)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"worker = {'worker-' * 3}\n")
    flags = ["--token-file", str(tokens), "--tls-cert", str(service.cert), "--tls-ca", str(authority.pem)]
    async with relay(*flags) as url:
        assert url.startswith("https:")
        how = {"token": "worker-" * 3, "tls": authority.client("trainer")}
        with Groups([url], sources=2, joiners=2, mib=64, **how) as groups, sent_by(groups) as source:
            groups.stage()
            await groups.heal(url=source.url)
            assert source.passed < 2 * MIB


@pytest.mark.parametrize("wrong", ["token", "certificate"])
async def test_a_relay_that_refuses_us_is_told_why_in_the_log_and_the_source_serves(tmp_path, caplog, wrong):
    authority = Authority(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"worker = {'worker-' * 3}\n")
    service = authority.service()
    flags = ["--token-file", str(tokens), "--tls-cert", str(service.cert)]
    trusted = authority.trusted() if wrong == "token" else Authority(tmp_path, "other").trusted()
    async with relay(*flags) as url:
        with Groups([url], token="another-" * 3, tls=trusted) as groups:
            groups.stage()
            await groups.heal()
    assert ("the token is wrong" if wrong == "token" else "CERTIFICATE_VERIFY_FAILED") in caplog.text


async def test_an_uplink_limits_what_an_upload_takes():
    async with relay() as url:
        with Groups([url], mib=48, uplink=32 * MIB) as groups:
            began = time.monotonic()
            groups.stage()
            await groups.heal(timeout=timedelta(seconds=30))
            assert time.monotonic() - began >= (48 - CHUNK_MIB) / 32 - 0.1 - 0.1


async def test_a_joiner_that_comes_when_the_others_are_done_heals():
    async with relay() as url:
        with Groups([url], joiners=2, mib=64) as groups:
            groups.stage()
            with peer("relay-joiner", "j1", "s0", "j0,j1", url, groups.sources[0].metadata()) as other:
                await groups.heal(0)
                said = await asyncio.to_thread(other.communicate, timeout=60)
                assert said[0].split() == ["begun", "healed"]
