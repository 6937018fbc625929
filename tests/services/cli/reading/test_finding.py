"""Where a command finds its lighthouse, job and token, and what it says when it does not."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.services.cli.scene import keepstep, running


async def test_no_lighthouse_says_what_was_tried_and_what_to_do() -> None:
    said = await keepstep("status", "--lighthouse", "127.0.0.1:1,http://127.0.0.1:2")
    assert said.code == 3
    assert "http://127.0.0.1:1: nothing listens there (connection refused)" in said.err
    assert "http://127.0.0.1:2: nothing listens there (connection refused)" in said.err
    assert "keepstep up" in said.err
    assert "Traceback" not in said.err
    said = await keepstep("status", "--lighthouse", "http://no-such-host.invalid:29510")
    assert said.code == 3
    assert "host no-such-host.invalid not found" in said.err


@asynccontextmanager
async def page(text: str, kind: str, status: int) -> AsyncIterator[str]:
    """The address of a server that answers everything with this."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type=kind, status=status)

    other = web.Application()
    other.router.add_get("/v1/{all:.*}", answer)
    runner = web.AppRunner(other)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("command", [("status",), ("run", "--replicas", "1", "true")])
@pytest.mark.parametrize(("status", "kind"), [(200, "text/html"), (404, "text/html"), (404, "application/json")])
async def test_a_server_of_another_kind_is_told_from_a_lighthouse(
    command: tuple[str, ...], status: int, kind: str
) -> None:
    async with page("<html>hello</html>", kind, status) as address:
        said = await keepstep(command[0], "--lighthouse", address, *command[1:])
        assert said.code == 3
        assert f"{address}: not a keepstep lighthouse" in said.err
        assert "torchft" in said.err
        assert "keepstep up`, or say" not in said.err
        assert "<html>" not in said.err


@pytest.mark.parametrize("command", [("status",), ("events", "--follow"), ("run", "--replicas", "1", "true")])
@pytest.mark.parametrize("text", ["hello", "[]"])
async def test_json_of_another_server_is_told_from_a_lighthouses(command: tuple[str, ...], text: str) -> None:
    async with page(text, "application/json", 200) as address:
        said = await keepstep(command[0], "--lighthouse", address, *command[1:])
        assert said.code == 3
        assert f"{address}: not a keepstep lighthouse" in said.err


async def test_the_first_lighthouse_that_answers_is_asked() -> None:
    async with running("r0") as job:
        assert (await keepstep("status", "--lighthouse", f"127.0.0.1:1,{job.lighthouse.address}")).code == 0


@pytest.mark.parametrize("variable", ["KEEPSTEP_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"])
async def test_the_lighthouse_comes_from_the_environment(variable: str) -> None:
    async with running("r0") as job:
        assert (await keepstep("status", **{variable: job.lighthouse.address})).code == 0


async def test_an_unknown_job_or_replica_is_named_with_those_there_are() -> None:
    async with running("r0") as job:
        said = await keepstep("inspect", "r7", *job.at)
        assert said.code == 4
        assert "'r7'" in said.err
        assert "known groups: r0" in said.err
        for given, variables in ((("--job", "night"), {}), ((), {"KEEPSTEP_JOB": "night"})):
            said = await keepstep("replicas", *job.at, *given, **variables)
            assert said.code == 4
            assert "'night'" in said.err
            assert "default" in said.err
        for name in (".", "..", "a/b", "%2e"):
            assert f"job {name!r} not found" in (await keepstep("replicas", "--job", name, *job.at)).err
            assert repr(name) in (await keepstep("drain", name, *job.at)).err
        assert "'%FF'" in (await keepstep("drain", "\udcff", *job.at)).err, "a byte that is no text"


async def test_an_empty_token_file_is_told_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    said = await keepstep("status", "--token-file", str(tmp_path / "token"))
    assert said.code == 2
    assert f"--token-file {tmp_path / 'token'} is empty" in said.err


async def test_a_token_of_two_lines_is_an_error_of_usage() -> None:
    said = await keepstep("status", KEEPSTEP_TOKEN="one\ntwo")
    assert said.code == 2
    assert "KEEPSTEP_TOKEN holds more than one line" in said.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--lighthouse", "nonsense"),
        ("status", "--lighthouse", "ftp://host:1"),
        ("status", "--lighthouse", "http://127.0.0.1:99999"),
        ("status", "--token-file", "/nowhere"),
        ("drain", ""),
        ("evict", "r0", "--ban", "soon"),
        ("policy", "--takeover-grace", "never"),
        ("events", "--limit", "0"),
        ("replicas", "--job", ""),
        ("demo", "--replicas", "1"),
        ("demo", "--seconds", "inf"),
        ("demo", "--summary", "/nowhere/summary.json"),
        ("run", "--replicas", "0", "true"),
        ("run", "--replicas", "1", "--grace", "nan", "true"),
        ("run", "--replicas", "1", "--job", "a b", "true"),
        ("nonsense",),
    ],
)
async def test_invalid_arguments_are_an_error_of_usage(arguments: tuple[str, ...]) -> None:
    said = await keepstep(*arguments)
    assert said.code == 2
    assert said.err.startswith("Usage:")


async def test_version_says_name_and_number() -> None:
    assert re.fullmatch(r"keepstep, version \d+\.\d+\.\d+\n", (await keepstep("--version")).out)
