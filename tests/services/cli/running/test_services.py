"""`keepstep lighthouse` and `keepstep up`: their flags, their start, their end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.services.cli.scene import ADMIN, DEADLINE, WORKER, first_line, keepstep, running
from tests.support.services.asking_group import Group
from tests.support.services.command import process


async def test_a_lighthouse_says_where_it_listens_and_ends_in_good_order() -> None:
    flags = ("--bind", "127.0.0.1:0", "--min-replicas", "2", "--max-replicas", "3", "--join-timeout", "500ms")
    flags += ("--heal-timeout", "2m", "--heartbeat-timeout", "7", "--reconnect-grace", "1s", "--takeover-grace", "3")
    flags += ("--initial-replicas", "5", "--verify-every", "100", "--on-divergence", "drain")
    flags += ("--drain-straggler-after", "50", "--job-ttl", "30d", "--max-jobs", "5", "--refuse-going-back", "true")
    flags += ("--finish-grace", "10", "--hang-after", "90s")
    async with process("lighthouse", *flags, "--log-format", "json") as service:
        address = (await first_line(service)).removeprefix("lighthouse ")
        async with Group(address):
            (job,) = json.loads((await keepstep("status", "--json", "--lighthouse", address)).out)["jobs"]
        assert job["policy"] == {
            "min_replicas": 2,
            "max_replicas": 3,
            "join_timeout": 0.5,
            "heal_timeout": 120.0,
            "heartbeat_timeout": 7.0,
            "reconnect_grace": 1.0,
            "takeover_grace": 3.0,
            "initial_replicas": 5,
            "verify_every": 100,
            "on_divergence": "drain",
            "drain_straggler_after": 50,
            "job_ttl": 30 * 86400.0,
            "refuse_going_back": True,
            "finish_grace": 10.0,
            "hang_after": 90.0,
        }
        service.terminate()
        async with asyncio.timeout(DEADLINE):
            _, err = await service.communicate()
        assert service.returncode == 0
        events = [json.loads(line)["event"] for line in err.decode().splitlines()]
        assert events[-1] == "service stopped"


async def policy_of(*arguments: str, **variables: str) -> dict[str, float]:
    async with process("lighthouse", "--bind", "127.0.0.1:0", *arguments, **variables) as service:
        address = (await first_line(service)).removeprefix("lighthouse ")
        async with Group(address):
            (job,) = json.loads((await keepstep("status", "--json", "--lighthouse", address)).out)["jobs"]
        policy: dict[str, float] = job["policy"]
        return policy


async def test_a_lighthouse_takes_the_flags_of_torchfts() -> None:
    flags = ("--min_replicas", "2", "--join_timeout_ms", "1500", "--quorum_tick_ms", "100")
    policy = await policy_of(*flags, "--heartbeat_timeout_ms", "2500")
    assert policy["min_replicas"] == 2
    assert policy["join_timeout"] == 1.5
    assert policy["heartbeat_timeout"] == 2.5


async def test_a_flag_of_a_lighthouse_beats_its_variable() -> None:
    variables = {"KEEPSTEP_LIGHTHOUSE_MIN_REPLICAS": "2", "KEEPSTEP_LIGHTHOUSE_JOIN_TIMEOUT": "7s"}
    policy = await policy_of("--min-replicas", "3", **variables)
    assert policy["min_replicas"] == 3
    assert policy["join_timeout"] == 7.0


async def test_the_mesh_keeps_its_state_in_a_folder(tmp_path: Path) -> None:
    state = tmp_path / "state"
    for epoch in (1, 2):
        async with process("up", "--bind", "127.0.0.1:0", "--state-dir", str(state)) as mesh:
            address = (await first_line(mesh)).removeprefix("lighthouse ")
            assert json.loads((await keepstep("status", "--json", "--lighthouse", address)).out)["epoch"] == epoch
            mesh.kill()
            await mesh.wait()
    assert {"lighthouse.sqlite", "events.jsonl"} <= {path.name for path in state.iterdir()}
    history = await keepstep("check-history", str(state), "--json")
    assert history.code == 0
    assert json.loads(history.out)["epochs"] == 2


async def test_a_lighthouse_with_a_store_and_an_event_log_of_its_own(tmp_path: Path) -> None:
    flags = ("--store", f"sqlite://{tmp_path}/quorums", "--event-log", str(tmp_path / "log"))
    await policy_of(*flags)
    assert (tmp_path / "quorums").exists()
    assert "joined" in (tmp_path / "log").read_text()


async def test_a_lighthouse_reads_its_tokens_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"worker = {WORKER}\nadmin = {ADMIN}\n")
    flags = ("--token-file", str(tmp_path / "tokens"))
    async with process("lighthouse", "--bind", "127.0.0.1:0", *flags) as service:
        address = (await first_line(service)).removeprefix("lighthouse ")
        assert (await keepstep("status", "--lighthouse", address)).code == 4
        assert (await keepstep("status", "--lighthouse", address, KEEPSTEP_TOKEN=ADMIN)).code == 0


async def test_a_service_that_cannot_start_says_why() -> None:
    async with running() as job:
        taken = job.lighthouse.address.removeprefix("http://")
        said = await keepstep("lighthouse", "--bind", taken)
        assert said.code == 1
        assert "address in use" in said.err
        assert "Traceback" not in said.err
    said = await keepstep("lighthouse", "--bind", "0.0.0.0:0")
    assert said.code == 1
    assert "--insecure" in said.err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--bind", "nonsense"), "--bind 'nonsense': not an address to listen on; write host:port"),
        (("--bind", "127.0.0.1"), "--bind '127.0.0.1': not an address"),
        (("--store", "bogus://x"), "--store 'bogus://x': expected memory://"),
        (("--lease", "1"), "--lease must be at least 3 s, not 1"),
        (("--min-replicas", "0"), "'--min-replicas' / '--min_replicas': 0 is not in the range"),
        (("--min-replicas", "3", "--max-replicas", "2"), "--max-replicas 2 is less than --min-replicas 3"),
        (("--heartbeat-timeout", "1ms"), "--heartbeat-timeout must be at least 0.1 s"),
        (("--token-file", "nowhere"), "'--token-file': File 'nowhere' does not exist"),
        (("--tls-cert", "nowhere"), "'--tls-cert': File 'nowhere' does not exist"),
    ],
)
async def test_a_service_whose_flags_make_no_sense_is_an_error_of_usage(flags: tuple[str, ...], told: str) -> None:
    said = await keepstep("lighthouse", *flags)
    assert said.code == 2
    assert told in said.err


async def test_a_variable_of_a_service_that_makes_no_sense_is_an_error_of_usage_too() -> None:
    said = await keepstep("lighthouse", KEEPSTEP_LIGHTHOUSE_JOIN_TIMEOUT="soon")
    assert said.code == 2
    assert "KEEPSTEP_LIGHTHOUSE_JOIN_TIMEOUT='soon': not a time" in said.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("relay", "--bind", "nonsense"), "--bind 'nonsense': not an address to listen on"),
        (("relay", "--memory", "1MiB"), "at least 64 MiB"),
        (("relay", "--lighthouse", "nonsense"), "'http://nonsense' is no address"),
        (("up", "--relay-bind", "nonsense"), "--relay-bind 'nonsense': not an address to listen on"),
        (("up", "--bind", "127.0.0.1:65530"), "--relay-bind '127.0.0.1:65540': not an address to listen on"),
    ],
)
async def test_a_relay_whose_flags_make_no_sense_is_an_error_of_usage(
    tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    state = ("--state-dir", str(tmp_path / "state")) if arguments[0] == "up" else ()
    said = await keepstep(*arguments, *state)
    assert said.code == 2
    assert told in said.err


async def test_the_event_log_of_a_mesh_is_where_the_variable_says(tmp_path: Path) -> None:
    up = ("up", "--bind", "127.0.0.1:0", "--state-dir", str(tmp_path / "state"))
    async with process(*up, KEEPSTEP_LIGHTHOUSE_EVENT_LOG=str(tmp_path / "log")) as mesh:
        await first_line(mesh)
    assert (tmp_path / "log").exists()
    assert not (tmp_path / "state" / "events.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "code"), [(("--min-replicas", "3", "--max-replicas", "2"), 2), (("--bind", "0.0.0.0:0"), 1)]
)
async def test_a_mesh_that_cannot_start_leaves_no_folder(tmp_path: Path, flags: tuple[str, ...], code: int) -> None:
    assert (await keepstep("up", "--state-dir", str(tmp_path / "state"), *flags)).code == code
    assert not (tmp_path / "state").exists()
    (tmp_path / "mine").mkdir()
    assert (await keepstep("up", "--state-dir", str(tmp_path / "mine"), *flags)).code == code
    assert (tmp_path / "mine").exists()


async def test_a_lighthouse_listens_beyond_this_machine_when_told_to() -> None:
    async with process("lighthouse", "--bind", "0.0.0.0:0", "--insecure", "--log-level", "error") as service:
        assert (await first_line(service)).startswith("lighthouse http://0.0.0.0:")
