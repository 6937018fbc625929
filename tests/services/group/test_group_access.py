"""Ranks and other clients that connect to the server of a group: who is let in, and what the others hear."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest

from keepstep.group.group_peers import first_layout_difference
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.group_messages import RankHello
from keepstep_mesh.protocol.messages import Refused
from keepstep_mesh.security.tokens import ClientToken
from tests.services.group.group_driver import DEADLINE, Group


@pytest.mark.parametrize(
    ("rank", "changes", "message"),
    [
        (1, {}, "rank 1 is connected already"),
        (2, {}, "asks to join a group of 2"),
        (1, {"world_size": 3}, "asks to join a group of 2"),
        (1, {"restart": 4}, "belongs to restart 4"),
    ],
)
async def test_a_rank_that_does_not_belong_is_refused_with_the_reason(pair, rank, changes, message):
    with pytest.raises(KeepstepError, match=message):
        await pair.connect(rank, **changes)
    assert not any("died" in reason for reason in pair.failed)


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1garbage", codec.pack(["rank_hello"]), codec.pack(["beat"]), codec.encode(RankHello(99, 99, 1, 2, 0))],
    ids=["empty", "not msgpack", "too short", "no hello", "another version"],
)
async def test_a_bad_first_frame_is_answered_with_what_is_wrong_and_disturbs_nobody(pair, frame):
    async with aiohttp.ClientSession() as client, client.ws_connect(f"{pair.server.address}/v1/ranks") as socket:
        await socket.send_bytes(frame)
        refused = codec.decode(await socket.receive_bytes(timeout=DEADLINE))
        assert isinstance(refused, Refused)
        assert refused.reason
    assert not pair.failed
    assert all(not isinstance(answer, Exception) for answer in await pair.ask())


async def test_a_client_that_hangs_up_is_no_error_of_the_server(pair, caplog):
    async with aiohttp.ClientSession() as client, client.ws_connect(f"{pair.server.address}/v1/ranks"):
        pass
    await pair.server.close()
    assert not [record for record in caplog.records if record.name == "aiohttp.server"]


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"])
async def test_a_connection_that_asks_nothing_is_cut_and_a_rank_is_not(lighthouse, monkeypatch, sent):
    monkeypatch.setattr("keepstep.group.group_listener.FIRST_REQUEST_SECONDS", 0.2)
    group = Group(lighthouse, 2)
    await group.start()
    try:
        host, port = group.server.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(sent)
        async with asyncio.timeout(DEADLINE):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        assert all(not isinstance(answer, Exception) for answer in await group.ask())
    finally:
        await group.close()


async def test_a_token_is_asked_for_on_every_route(lighthouse):
    group = Group(lighthouse, 2, token="secret-token")
    await group.start()
    try:
        async with aiohttp.ClientSession() as client:
            for path in ("/v1/ranks", "/v1/ranks/0/checkpoint", "/v1/layout", "/v1/anything"):
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    async with client.get(group.server.address + path, headers=headers) as answer:
                        assert answer.status == 401, path
            async with client.get(group.server.address + "/healthz") as answer:
                assert answer.status == 200
        with pytest.raises(TimeoutError, match="401"):
            await group.connect(1, token="wrong", timeout=0.3)
    finally:
        await group.close()


async def test_during_a_rotation_ranks_and_peers_with_either_token_come_in(lighthouse, tmp_path):
    file = tmp_path / "token"
    file.write_text("new\nold\n")
    token = ClientToken({"KEEPSTEP_TOKEN_FILE": str(file)})
    group = Group(lighthouse, 3, token=token)
    await group.server.start()
    try:
        group.clients = [await group.connect(1, token="old"), await group.connect(2, token="new")]
        group.server.layout_lines = ["a (2,)"]
        for one in ("old", "new", token):
            assert "only here" in (await first_layout_difference(group.server.address, one, ["a (2,)", "b (1,)"]))[1]
        file.write_text("new\n")
        token.refresh()
        assert "401" in (await first_layout_difference(group.server.address, "old", []))[1]
    finally:
        await group.close()
