"""`keepstep relay`, `keepstep checkpoint` and the relay of `keepstep up`, as processes."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from keepstep_relay.settings import read_settings
from tests.services.cli import scene
from tests.support.services.command import process
from tests.support.services.relay_driver import DEADLINE, client, relay_process, state

ONE, TWO = state(1, 9 << 20), state(2, 5000)


async def keepstep(*arguments: str) -> tuple[int, str]:
    """(exit code, all that it says)."""
    said = await scene.keepstep(*arguments)
    return said.code, said.out + said.err


async def as_json(*arguments: str) -> Any:
    code, text = await keepstep(*arguments, "--json")
    assert code == 0, text
    return json.loads(text)


async def test_checkpoints_are_listed_shown_verified_and_removed(tmp_path: Path) -> None:
    async with relay_process("--data-dir", str(tmp_path)) as (_, address):
        at = ("--relay", address, "--job", "job")
        assert "no checkpoints" in (await keepstep("checkpoint", "ls", *at))[1]
        async with client(address) as worker:
            await worker.store(ONE, "c1", 1)
            await worker.upload(TWO, "c2", 2, chunks=[])
        code, text = await keepstep("checkpoint", "ls", *at)
        assert code == 0
        (line,) = [line for line in text.splitlines() if line.split()[:1] == ["c1"]]
        assert line.split()[1:6] == ["1", "live", "committed", "1", "9.0"]
        listed = await as_json("checkpoint", "ls", *at)
        assert [(one["id"], one["state"], one["lacking"]) for one in listed["checkpoints"]] == [
            ("c1", "committed", 0),
            ("c2", "planned", 1),
        ]
        assert (await as_json("checkpoint", "show", "c1", *at))["by_rank"][0]["root"] == ONE.root
        code, text = await keepstep("checkpoint", "show", "c1", *at)
        assert code == 0
        assert ONE.root[:16] in text
        code, text = await keepstep("checkpoint", "verify", "c1", *at)
        assert (code, text) == (0, "c1: 2 chunks, 9.0 MiB, good\n")
        assert await as_json("checkpoint", "rm", "c1", *at) == {"job": "job", "id": "c1", "removed": True}
        code, text = await keepstep("checkpoint", "show", "c1", *at)
        assert code == 4
        assert "was deleted: removed by admin" in text


async def test_verify_names_what_is_damaged_and_what_is_not_there(tmp_path: Path) -> None:
    async with relay_process("--data-dir", str(tmp_path)) as (_, address), client(address) as worker:
        await worker.store(ONE, "c1", 1)
        await worker.upload(TWO, "c2", 2, chunks=[])
    file = tmp_path / "chunks" / ONE.digests[1][:2] / ONE.digests[1]
    file.write_bytes(b"x" + file.read_bytes()[1:])
    async with relay_process("--data-dir", str(tmp_path)) as (_, address):
        at = ("--relay", address, "--job", "job")
        code, text = await keepstep("checkpoint", "verify", "c1", *at)
        assert code == 1
        assert "rank 0 chunk 1:" in text
        assert "1 damaged" in text
        code, text = await keepstep("checkpoint", "verify", "c2", *at, "--json")
        assert code == 1
        assert [one["chunk"] for one in json.loads(text)["damaged"]] == [0]


async def test_up_runs_a_relay_that_the_lighthouse_knows_and_that_survives_a_restart(tmp_path: Path) -> None:
    up = ("up", "--bind", "127.0.0.1:0", "--state-dir", str(tmp_path), "--log-level", "error")
    for restart in range(2):
        async with process(*up) as mesh, asyncio.timeout(DEADLINE):
            lighthouse, relay, metrics = [(await mesh.stdout.readline()).decode().split() for _ in range(3)]
            assert (lighthouse[0], relay[0], metrics[0]) == ("lighthouse", "relay", "metrics")
            async with client(relay[1]) as worker:
                if not restart:
                    await worker.store(TWO)
                assert await worker.pack() == TWO.pack
            while True:
                code, text = await keepstep("checkpoint", "ls", "--job", "job", "--lighthouse", lighthouse[1])
                if code != 3 or "knows no relay" not in text:
                    break
            assert code == 0, text
            assert "c1" in text
            mesh.send_signal(signal.SIGTERM)
            assert await mesh.wait() == 0


async def test_without_a_relay_it_is_said_what_to_do(tmp_path: Path) -> None:
    code, text = await keepstep("checkpoint", "ls", "--relay", "127.0.0.1:1")
    assert code == 3
    assert "no relay answers" in text
    assert "--relay or KEEPSTEP_RELAY" in text
    code, text = await keepstep("relay", "--memory", "much")
    assert code == 2
    assert "not a size" in text
    (tmp_path / "file").write_text("")
    code, text = await keepstep("relay", "--bind", "127.0.0.1:0", "--data-dir", str(tmp_path / "file" / "below"))
    assert code == 1
    assert "cannot use the data directory" in text
    code, text = await keepstep("relay", "--bind", "127.0.0.1:0", "--durable", "nowhere://x")
    assert code == 1
    assert "--durable nowhere://x" in text


async def test_certificates_that_cannot_be_used_for_a_lighthouse_are_said_at_the_start() -> None:
    flags = ("--bind=127.0.0.1:0", "--lighthouse=https://127.0.0.1:1")
    said = await scene.keepstep("relay", *flags, KEEPSTEP_TLS_CA="/nowhere/ca.pem")
    assert said.code == 1
    assert "the CA file /nowhere/ca.pem cannot be read" in said.err


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("keep_live", -1, "invalid keep_live -1: expected 0 or more"),
        ("upload_timeout", 0.0, "invalid upload_timeout 0: expected more than 0"),
        ("bind", "nowhere", "bind 'nowhere': not an address to listen on"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(flag: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_settings({flag: value})
