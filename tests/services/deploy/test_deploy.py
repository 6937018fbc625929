"""The scripts of the images: they make and copy tokens, a trainer uses a free number, the health check is right."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keepstep_mesh.protocol.messages import Quorum, Welcome
from keepstep_mesh.security.tokens import Role, Tokens, tokens_of_service
from tests.support.network.certificates import Authority
from tests.support.services.command import environment, killed_at_the_end
from tests.support.services.lighthouse_driver import DEADLINE, connection, lighthouse
from tests.support.services.relay_driver import relay

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


async def run(script: str, *arguments: str | Path, **variables: str) -> tuple[int, str]:
    """Exit code and what it says on standard error."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, DEPLOY / script, *arguments, env=environment(**variables), stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE):
        _, said = await started.communicate()
    assert started.returncode is not None
    return started.returncode, said.decode()


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    for name in ("tokens", "worker-token", "prometheus-token"):
        (tmp_path / name).mkdir()
    return tmp_path


def modes(volumes: Path) -> set[int]:
    """Of the files in them."""
    return {file.stat().st_mode & 0o777 for file in volumes.glob("*/*")}


async def test_tokens_are_made_once_and_each_is_handed_to_who_needs_it(volumes: Path) -> None:
    assert await run("setup.py", volumes) == (0, "")
    file = volumes / "tokens" / "tokens"
    tokens = tokens_of_service({}, file)
    assert {one.role for one in tokens.all} == set(Role)
    assert await run("setup.py", volumes) == (0, "")
    assert tokens_of_service({}, file) == tokens
    of_role = {one.role: one.value for one in tokens.all}
    assert (volumes / "worker-token" / "token").read_text() == of_role[Role.WORKER]
    assert (volumes / "prometheus-token" / "token").read_text() == of_role[Role.SERVICE]
    assert modes(volumes) == {0o600}


async def test_tokens_that_are_there_are_kept_and_the_first_of_a_role_is_handed_out(volumes: Path) -> None:
    text = "# ours\nworker a = new-worker-token-00\nworker = old-worker-token-00\n\nservice=a-service-token-00\n"
    (volumes / "tokens" / "tokens").write_text(text)
    assert await run("setup.py", volumes) == (0, "")
    assert (volumes / "tokens" / "tokens").read_text() == text
    assert (volumes / "worker-token" / "token").read_text() == "new-worker-token-00"
    assert (volumes / "prometheus-token" / "token").read_text() == "a-service-token-00"


async def test_tokens_without_one_for_a_role_that_is_handed_out_are_refused(volumes: Path) -> None:
    (volumes / "tokens" / "tokens").write_text("worker = worker-token-00\nservice =\n")
    code, error = await run("setup.py", volumes)
    assert code == 1
    assert "tokens has no token for service: add a line `role = token` for each" in error
    assert not (volumes / "worker-token" / "token").exists()


@asynccontextmanager
async def trainer(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run trainer.py beside a `keepstep` that only prints its command; yield the process and this line."""
    command = folder / "bin" / "keepstep"
    command.parent.mkdir(exist_ok=True)
    command.write_text('#!/bin/sh\necho "$@"; exec sleep 600\n')
    command.chmod(0o700)
    path = f"{command.parent}:{os.environ['PATH']}"
    variables = environment(PATH=path, TRAINERS="2", TMPDIR=str(folder))
    script = (sys.executable, str(DEPLOY / "trainer.py"), str(folder), "train.py", "--steps=1")
    async with killed_at_the_end(*script, env=variables) as started, asyncio.timeout(DEADLINE):
        assert started.stdout is not None
        yield started, (await started.stdout.readline()).decode().strip()


async def test_each_trainer_takes_a_number_of_its_own_and_one_that_dies_gives_it_back(tmp_path: Path) -> None:
    said = "run --replicas 1 --first-replica {} --replicas-in-job 2 --final-code 0 -- train.py --steps=1"
    async with trainer(tmp_path) as (first, of_first), trainer(tmp_path) as (_, of_second):
        assert (of_first, of_second) == (said.format(0), said.format(1))
        assert (tmp_path / "group").read_text() == "1"
        code, error = await run("trainer.py", tmp_path, "train.py", TRAINERS="2")
        assert code == 1
        assert "all 2 groups run in other containers" in error
        first.kill()
        await first.wait()
        async with trainer(tmp_path) as (_, of_third):
            assert of_third == said.format(0)


async def test_a_service_is_healthy_while_it_can_do_its_work(tmp_path: Path) -> None:
    async with relay() as one:
        port = one.address.rpartition(":")[2]
        assert await run("healthy.py", "relay", port) == (0, "")
    code, error = await run("healthy.py", "relay", port)
    assert code == 1
    assert "refused" in error


@pytest.mark.parametrize("mutual", [False, True])
async def test_a_service_that_speaks_tls_is_asked_by_it(mutual: bool, tmp_path: Path) -> None:
    tls = Authority(tmp_path).service(mutual=mutual)
    async with relay(tls=tls) as one:
        port = one.address.rpartition(":")[2]
        assert await run("healthy.py", "relay", port, KEEPSTEP_RELAY_TLS_CERT=str(tls.cert)) == (0, "")
        assert (await run("healthy.py", "relay", port))[0] == 1


async def test_a_trainer_is_healthy_while_a_lighthouse_knows_its_group(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-worker-token-of-ours\n")
    (tmp_path / "group").write_text("0")
    at = {"KEEPSTEP_TOKEN_FILE": str(tmp_path / "token"), "KEEPSTEP_JOB": "job", "TMPDIR": str(tmp_path)}
    async with lighthouse(tokens=Tokens(worker="a-worker-token-of-ours")) as one:
        at["KEEPSTEP_LIGHTHOUSE"] = f"http://127.0.0.1:1,{one.address}"  # the first is not there
        assert (await run("healthy.py", "trainer", **at))[0] == 1
        async with connection(one.address, "r0:1", Authorization="Bearer a-worker-token-of-ours") as group:
            await group.hello()
            await group.next(Welcome)
            assert await run("healthy.py", "trainer", **at) == (0, "")


async def test_a_group_is_ready_when_it_takes_part(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-worker-token-of-ours\n")
    at = {"KEEPSTEP_TOKEN_FILE": str(tmp_path / "token"), "KEEPSTEP_JOB": "job", "REPLICA_GROUP_ID": "0"}
    async with lighthouse(tokens=Tokens(worker="a-worker-token-of-ours")) as one:
        at["KEEPSTEP_LIGHTHOUSE"] = one.address
        async with connection(one.address, "r0:1", Authorization="Bearer a-worker-token-of-ours") as group:
            await group.hello()
            await group.next(Welcome)
            assert await run("healthy.py", "group", **at) == (1, "the group is idle\n")
            await group.ask()
            await group.until(Quorum)
            assert await run("healthy.py", "group", **at) == (0, "")
