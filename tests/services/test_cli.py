"""The `keepstep` command as a process, against a real lighthouse with real sessions."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from asking_group import Group
from command import process
from keepstep_cli import embedded, rest
from keepstep_cli.errors import Unreachable
from keepstep_cli.ranks import free_port
from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.events import Policy
from keepstep_mesh.auth import Access, Tokens
from keepstep_mesh.http import Route
from keepstep_mesh.messages import Drain, Evicted, StateRoot
from keepstep_mesh.service import Service, serving
from lighthouse_driver import eventually, lighthouse, worker

DEADLINE = 60.0
WORKER, ADMIN = "worker-token-of-the-test", "admin-token-of-the-test"


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


async def keepstep(*arguments: str, **variables: str) -> Said:
    async with process(*arguments, **variables) as started, asyncio.timeout(DEADLINE):
        out, err = await started.communicate()
        assert started.returncode is not None
        return Said(started.returncode, out.decode(), err.decode())


@dataclass
class Job:
    lighthouse: Lighthouse
    groups: list[Group]

    @property
    def at(self) -> tuple[str, str]:
        return "--lighthouse", self.lighthouse.address


@asynccontextmanager
async def running(*names: str, tokens: Tokens | None = None) -> AsyncIterator[Job]:
    """A lighthouse and groups of these names under its first quorum."""
    policy, token = Policy(min_replicas=max(1, len(names))), tokens.worker if tokens else None
    async with lighthouse(policy=policy, tokens=tokens or Tokens()) as one, contextlib.AsyncExitStack() as stack:
        groups = [
            await stack.enter_async_context(Group(one.address, name=name, job="default", token=token)) for name in names
        ]
        await asyncio.gather(*(group.ask(1) for group in groups))
        yield Job(one, groups)


# ---- asking


async def test_status_shows_the_lighthouse_and_its_jobs() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("status", *job.at)
        assert said.code == 0, said.err
        assert f"lighthouse {job.lighthouse.address}: leads, epoch 1" in said.out
        assert re.search(r"default +1 +2 +0 +2 +0 +2", said.out)
        answer = json.loads((await keepstep("status", *job.at, "--json")).out)
        assert answer["epoch"] == 1
        assert [one["job"] for one in answer["jobs"]] == ["default"]


async def test_status_shows_the_services_and_the_store() -> None:
    async with running() as job, aiohttp.ClientSession() as http:
        body = {"address": "http://10.0.0.7:29520", "details": {"gib": 64}}
        async with http.put(f"{job.lighthouse.address}/v1/services/relay/relay-1", json=body) as answer:
            assert answer.status == 200
        said = await keepstep("status", *job.at)
        assert "store memory: works" in said.out
        assert "relay relay-1 http://10.0.0.7:29520 gib=64" in said.out
        (service,) = json.loads((await keepstep("status", "--json", *job.at)).out)["services"]
        assert (service["kind"], service["details"]) == ("relay", {"gib": 64})


async def test_status_of_an_idle_lighthouse_says_how_to_start_a_job_there() -> None:
    async with running() as job:
        said = (await keepstep("status", *job.at)).out
        assert f"keepstep run --lighthouse {job.lighthouse.address} --replicas 2" in said


async def test_status_of_one_job_is_that_of_no_other() -> None:
    async with running("r0") as job, Group(job.lighthouse.address, name="r0", job="night"):
        both = json.loads((await keepstep("status", "--json", *job.at, KEEPSTEP_JOB="night")).out)["jobs"]
        assert [one["job"] for one in both] == ["default", "night"]
        one = json.loads((await keepstep("status", "--json", *job.at, "--job", "night")).out)["jobs"]
        assert [one["job"] for one in one] == ["night"]
        assert (await keepstep("status", *job.at, "--job", "nope")).code == 4


UUID = "9a7c6573-1111-4222-8333-123456789abc"


async def test_an_incarnation_is_shown_and_taken_by_its_beginning() -> None:
    async with running("r0") as job, worker(job.lighthouse.address, f"r1:{UUID}", "default"):
        for command in ("replicas", "events", "quorum"):
            said = (await keepstep(command, *job.at)).out
            assert UUID not in said
        assert "r1:9a7c6573 " in (await keepstep("replicas", *job.at)).out
        assert UUID in (await keepstep("replicas", "--json", *job.at)).out
        assert f"r1:{UUID}" in (await keepstep("inspect", "r1:9a7c6573", *job.at)).out


async def test_replicas_shows_each_group_on_a_line_of_its_own() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("replicas", *job.at)
        assert said.code == 0, said.err
        assert re.search(r"r0:1 +training +yes +1 ", said.out)
        assert re.search(r"r1:1 +training +yes +1 ", said.out)
        answer = json.loads((await keepstep("replicas", *job.at, "--json")).out)
        assert [one["replica_id"] for one in answer["replicas"]] == ["r0:1", "r1:1"]


@pytest.mark.parametrize("name", ["r1", "r1:1"])
async def test_inspect_takes_a_name_or_an_incarnation(name: str) -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("inspect", name, *job.at)
        assert re.search(r"replica id +r1:1", said.out)
        assert re.search(r"address +http://10.0.0.1:1", said.out)
        assert json.loads((await keepstep("inspect", name, "--json", *job.at)).out)["name"] == "r1"


async def test_quorum_explains_why_the_next_one_is_not_there() -> None:
    async with running("r0", "r1") as job:
        asking = asyncio.create_task(job.groups[0].ask(2))
        await eventually(lambda: job.lighthouse.jobs["default"].core.quorum_view(0.0).asking == ("r0:1",))
        plain = await keepstep("quorum", *job.at)
        assert "job default: quorum 1 of epoch 1" in plain.out
        assert re.search(r"r0:1 +yes", plain.out)
        assert re.search(r"r1:1 +no", plain.out)
        assert "min_replicas" not in plain.out
        explained = await keepstep("quorum", *job.at, "--explain")
        assert re.search(r"^min_replicas: .*2", explained.out, re.MULTILINE), explained.out
        await job.groups[1].ask(2)
        await asking


async def test_events_shows_what_happened_and_takes_after_and_limit() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("events", *job.at)
        assert re.search(r"joined +r0:1", said.out)
        assert re.search(r"quorum +quorum_id=1", said.out)
        events = json.loads((await keepstep("events", *job.at, "--json")).out)["events"]
        assert len(events) == len(said.out.splitlines())
        newest = json.loads((await keepstep("events", *job.at, "--json", "--limit", "1")).out)["events"]
        assert newest == events[-1:]
        oldest = json.loads((await keepstep("events", *job.at, "--json", "--limit", "1", "--after", "0")).out)["events"]
        assert oldest == events[:1]
        rest = await keepstep("events", *job.at, "--json", "--after", str(events[0]["id"]))
        assert json.loads(rest.out)["events"] == events[1:]


@pytest.mark.parametrize("flag", ["--follow", "-f"])
async def test_events_follow_goes_on_with_each_event(flag: str) -> None:
    async with running("r0") as job, process("events", flag, "--json", *job.at) as follower:
        assert follower.stdout is not None
        async with asyncio.timeout(DEADLINE):
            while json.loads(await follower.stdout.readline())["kind"] != "quorum":
                pass
            await job.groups[0].session.leave("the test is over", DEADLINE)
            assert json.loads(await follower.stdout.readline())["replica_id"] == "r0:1"


async def line_of(stream: asyncio.StreamReader | None, text: str) -> str:
    """The next line that has ``text``."""
    assert stream is not None
    async with asyncio.timeout(DEADLINE):
        while line := (await stream.readline()).decode():
            if text in line:
                return line
    raise AssertionError(f"no line with {text!r}")


async def test_events_follow_waits_for_a_job_and_goes_on_at_the_next_lighthouse_that_answers(tmp_path: Path) -> None:
    store, port = f"sqlite://{tmp_path / 'store'}", free_port()
    async with lighthouse(store=store) as first:
        addresses = f"{first.address},http://127.0.0.1:{port}"
        async with process("events", "--follow", "--json", "--lighthouse", addresses) as follower:
            assert "there is no job 'default'" in await line_of(follower.stderr, "waiting for it")
            async with Group(first.address, name="r1", job="default"):
                assert json.loads(await line_of(follower.stdout, "joined"))["replica_id"] == "r1:1"
            await first.stop()
            assert re.search(r"asking for (those|the events) after \d+$", await line_of(follower.stderr, "asking for"))
            async with (
                lighthouse(store=store, bind=f"127.0.0.1:{port}") as second,
                Group(second.address, name="r3", job="default"),
            ):
                assert json.loads(await line_of(follower.stdout, "r3"))["kind"] == "joined"


async def test_a_follower_gives_up_when_no_lighthouse_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(rest, "ASK_AGAIN_SECONDS", 0.05)
    async with running("r0") as job:
        told: list[str] = []
        following = rest.Lighthouse(job.lighthouse.address, None)
        events = following.follow("jobs", "default", "events", after=0, told=told.append, follow=1)
        assert (await anext(events))["kind"] == "joined"
        await job.lighthouse.stop()
        with pytest.raises(Unreachable, match="no lighthouse answers"):
            async with asyncio.timeout(DEADLINE):
                async for _ in events:
                    pass
        assert len(told) == 1


# ---- ordering


async def test_drain_asks_the_group_to_leave() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("drain", "r1", "--reason", "new cable", *job.at)
        assert said.code == 0, said.err
        assert re.search(r"drain.*r1", said.out)
        push = await job.groups[1].push_of(Drain)
        assert isinstance(push, Drain)
        assert "new cable" in push.reason


async def test_evict_with_a_ban_keeps_a_name_out_until_it_is_readmitted() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("evict", "r1", "--ban", "10m", "--reason", "sick", "--json", *job.at)
        assert said.code == 0, said.err
        assert json.loads(said.out)["kind"] == "evicted"
        assert (await keepstep("evict", "r7", "--ban", "1m", *job.at)).out.startswith(
            "no group r7 is there now; r7 is "
        )
        push = await job.groups[1].push_of(Evicted)
        assert isinstance(push, Evicted)
        assert push.ban_seconds > 0
        assert re.search(r"r1 until \d\d:\d\d:\d\d", (await keepstep("status", *job.at)).out)
        said = await keepstep("readmit", "r1", *job.at)
        assert said.code == 0, said.err
        assert said.out.startswith("r1, r1:1 may come back\n")
        assert (await keepstep("readmit", "r1", *job.at)).out.startswith("nothing to do: nothing stands against r1\n")
        bans = json.loads((await keepstep("status", "--json", *job.at)).out)["jobs"][0]["bans"]
        assert [ban["target"] for ban in bans] == ["r7"]


EVICTED_ONCE = """
import os, pathlib, sys
pathlib.Path(os.environ["KEEPSTEP_NAME_FILE"]).write_text("train_ddp_1")
sys.exit(77 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""


async def test_run_asks_for_a_ban_by_the_name_that_the_group_has_at_the_lighthouse(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EVICTED_ONCE)
    async with running("train_ddp_1") as job:
        assert (await keepstep("evict", "train_ddp_1", "--ban", "10m", *job.at)).code == 0
        async with process("run", "--replicas", "1", *job.at, "--", str(tmp_path / "script.py")) as run:
            said = await line_of(run.stderr, "not started again")
            assert said.rstrip().endswith("`keepstep readmit train_ddp_1` ends that")
            assert (await keepstep("readmit", "train_ddp_1", *job.at)).code == 0
            await line_of(run.stderr, "[r0] finished")


async def test_run_starts_nothing_where_the_lighthouse_refuses_its_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-another-mesh\n")
    async with running("r0", tokens=Tokens(worker=WORKER, admin=ADMIN)) as job:
        for given, told in (
            ((), "a token is needed"),
            (("--token-file", str(tmp_path / "token")), "the token is wrong"),
        ):
            said = await keepstep("run", "--replicas", "1", *job.at, *given, "--", "echo", "started")
            assert said.code == 4
            assert said.out == ""
            assert told in said.err
        assert f"What was shown came from the file {tmp_path / 'token'}." in said.err
        said = await keepstep("run", "--replicas", "1", *job.at, "--", "echo", "started", KEEPSTEP_TOKEN=WORKER)
        assert (said.code, said.out) == (0, "[r0/0] started\n")


async def test_policy_shows_the_limits_of_a_job_and_changes_those_that_are_given() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("policy", *job.at)
        assert said.code == 0, said.err
        assert re.search(r"min replicas +2 ", said.out)
        assert re.search(r"takeover grace +the heartbeat timeout", said.out)
        flags = ("--min-replicas", "1", "--max-replicas", "4", "--join-timeout", "500ms", "--heal-timeout", "2m")
        flags += ("--heartbeat-timeout", "7", "--reconnect-grace", "1s", "--takeover-grace", "3")
        flags += ("--verify-every", "500", "--on-divergence", "report")
        changed = await keepstep("policy", "default", *flags, *job.at)
        assert changed.code == 0, changed.err
        assert re.search(r"join timeout +500 ms", changed.out)
        assert re.search(r"verify every +500 .*\n.*on divergence +report", changed.out)
        assert re.search(r"policy .*by=admin at 127.0.0.1 changed=", changed.out)
        again = await keepstep("policy", "--max-replicas", "4", *job.at)
        assert again.code == 0
        assert again.out.splitlines()[-1] == "nothing to do: it was so before"
        assert (await keepstep("policy", "default", "--job", "other", *job.at)).code == 2
        assert json.loads((await keepstep("policy", *job.at, "--json")).out) == {
            "min_replicas": 1,
            "max_replicas": 4,
            "join_timeout": 0.5,
            "heal_timeout": 120.0,
            "heartbeat_timeout": 7.0,
            "reconnect_grace": 1.0,
            "takeover_grace": 3.0,
            "initial_replicas": 0,
            "verify_every": 500,
            "on_divergence": "report",
        }
        answer = json.loads((await keepstep("policy", "--takeover-grace", "none", "--json", *job.at)).out)
        assert answer["policy"]["takeover_grace"] is None
        assert answer["event"]["kind"] == "policy"
        refused = await keepstep("policy", "--min-replicas", "5", *job.at)
        assert refused.code == 4
        assert "max_replicas 4 is less than min_replicas 5" in refused.err
        assert (await keepstep("policy", "night", *job.at)).code == 4


async def compared(job: Job, *roots: str, flags: tuple[str, ...] = ()) -> Said:
    """`verify-replicas` of groups that say these roots, each its own; none for ""."""
    async with asyncio.TaskGroup() as tasks:
        said = tasks.create_task(keepstep("verify-replicas", *job.at, *flags))
        await eventually(lambda: job.lighthouse.events.latest("default", "verify_ordered", "") is not None)
        asked = await asyncio.gather(*(group.ask(2) for group in job.groups))
        assert all(quorum.verify for quorum in asked)
        known = [StateRoot(2, "state 2", root) if root else None for root in roots]
        await asyncio.gather(*(group.ask(3, root=root) for group, root in zip(job.groups, known, strict=True)))
    return said.result()


async def test_verify_replicas_finds_equal_groups_equal_and_names_those_that_say_nothing() -> None:
    async with running("r0", "r1", "r2") as job:
        said = await compared(job, "a" * 64, "a" * 64, "")
        assert said.code == 0, said.err
        assert re.search(r"r0:1 +a{16} *\n +r1:1 +a{16} *\n +r2:1 +- *\n", said.out), said.out
        assert "step 2, 2 groups: all have equal weights, the others said nothing" in said.out


async def test_verify_replicas_names_the_group_that_differs_and_exits_with_1() -> None:
    async with running("r0", "r1", "r2") as job:
        said = await compared(job, "a" * 64, "b" * 64, "a" * 64)
        assert said.code == 1, said.err
        assert re.search(r"r1:1 +b{16} +differs", said.out), said.out
        assert "step 2, 3 groups: not as most are: r1:1; healed" in said.out


async def test_verify_replicas_of_two_that_differ_says_that_nobody_can_tell() -> None:
    async with running("r0", "r1") as job:
        said = await compared(job, "a" * 64, "b" * 64)
        assert said.code == 1, said.err
        assert "differs" not in said.out
        assert "nobody can tell who is right; nothing is done" in said.out


async def test_verify_replicas_has_json() -> None:
    async with running("r0", "r1") as job:
        said = await compared(job, "a" * 64, "a" * 64, flags=("--json",))
        event = json.loads(said.out)
        assert (event["kind"], event["detail"]["roots"]) == ("replicas_verified", {"a" * 64: ["r0:1", "r1:1"]})


async def test_verify_replicas_of_groups_that_do_not_train_ends_in_time_and_says_why() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("verify-replicas", "--wait", "200ms", *job.at)
        assert (said.code, said.out) == (1, "")
        assert "were not compared within 0.2 s" in said.err


async def test_orders_need_the_admin_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{ADMIN}\n")
    async with running("r0", tokens=Tokens(worker=WORKER, admin=ADMIN)) as job:
        for variables in ({}, {"KEEPSTEP_TOKEN": "wrong"}, {"KEEPSTEP_TOKEN": WORKER}):
            said = await keepstep("drain", "r0", *job.at, **variables)
            assert said.code == 4, said
            assert "--token-file or KEEPSTEP_TOKEN" in said.err
        assert (await keepstep("replicas", *job.at, KEEPSTEP_TOKEN=WORKER)).code == 0
        assert (await keepstep("replicas", *job.at, KEEPSTEP_TOKEN_FILE=str(tmp_path / "token"))).code == 0
        flag = await keepstep("drain", "r0", *job.at, "--token-file", str(tmp_path / "token"), KEEPSTEP_TOKEN="wrong")
        assert flag.code == 0, flag.err


# ---- what goes wrong, and where things come from


async def test_no_lighthouse_says_what_was_tried_and_what_to_do() -> None:
    said = await keepstep("status", "--lighthouse", "127.0.0.1:1,http://127.0.0.1:2")
    assert said.code == 3
    assert "http://127.0.0.1:1: nothing listens there (connection refused)" in said.err
    assert "http://127.0.0.1:2: nothing listens there (connection refused)" in said.err
    assert "keepstep up" in said.err
    assert "Traceback" not in said.err
    said = await keepstep("status", "--lighthouse", "http://no-such-host.invalid:29510")
    assert said.code == 3
    assert "there is no host no-such-host.invalid" in said.err


@pytest.mark.parametrize("command", [("status",), ("run", "--replicas", "1", "true")])
@pytest.mark.parametrize(("status", "kind"), [(200, "text/html"), (404, "text/html"), (404, "application/json")])
async def test_a_server_of_another_kind_is_told_from_a_lighthouse(
    command: tuple[str, ...], status: int, kind: str
) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>hello</html>", content_type=kind, status=status)

    other = web.Application()
    other.router.add_get("/v1/{all:.*}", page)
    runner = web.AppRunner(other)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        said = await keepstep(command[0], "--lighthouse", address, *command[1:])
        assert said.code == 3
        assert f"{address}: what answers there is no keepstep lighthouse" in said.err
        assert "torchft" in said.err
        assert "keepstep up`, or say" not in said.err
        assert "<html>" not in said.err
    finally:
        await runner.cleanup()


async def test_the_usual_port_is_taken_if_it_is_free_and_a_lighthouse_there_is_told() -> None:
    async with running() as job:
        taken = int(job.lighthouse.address.rpartition(":")[2])
        port, other = await asyncio.to_thread(embedded.place, taken)
        assert port != taken
        assert other == job.lighthouse.address
    assert embedded.place(taken) == (taken, None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port, other = embedded.place(silent.getsockname()[1])
        assert other is None


async def test_the_first_lighthouse_that_answers_is_asked() -> None:
    async with running("r0") as job:
        assert (await keepstep("status", "--lighthouse", f"127.0.0.1:1,{job.lighthouse.address}")).code == 0


async def test_an_order_follows_to_the_lighthouse_that_leads_and_takes_its_token_along() -> None:
    tokens = Tokens(worker=WORKER, admin=ADMIN)
    async with running("r0", tokens=tokens) as job:
        places = [job.lighthouse.address]

        async def elsewhere(request: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": f"{places[-1]}{request.path}"})

        route = Route("POST", "/v1/{all:.*}", elsewhere, Access.ADMIN)
        async with serving(Service("follower", [route]), "127.0.0.1", 0, tokens=tokens) as follower:
            said = await keepstep("drain", "r0", "--lighthouse", follower.url, KEEPSTEP_TOKEN=ADMIN)
            assert said.code == 0, said.err
            places.append(follower.url)
            said = await keepstep("drain", "r0", "--lighthouse", follower.url, KEEPSTEP_TOKEN=ADMIN)
            assert said.code == 3
            assert f"{follower.url}: does not lead; {follower.url} does" in said.err


@pytest.mark.parametrize("variable", ["KEEPSTEP_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"])
async def test_the_lighthouse_comes_from_the_environment(variable: str) -> None:
    async with running("r0") as job:
        assert (await keepstep("status", **{variable: job.lighthouse.address})).code == 0


async def test_an_unknown_job_or_replica_is_named_with_those_there_are() -> None:
    async with running("r0") as job:
        said = await keepstep("inspect", "r7", *job.at)
        assert said.code == 4
        assert "'r7'" in said.err
        assert "r0:1" in said.err
        for given, variables in ((("--job", "night"), {}), ((), {"KEEPSTEP_JOB": "night"})):
            said = await keepstep("replicas", *job.at, *given, **variables)
            assert said.code == 4
            assert "'night'" in said.err
            assert "default" in said.err


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
        ("demo", "--replicas", "1"),
        ("run", "--replicas", "0", "x.py"),
        ("nonsense",),
    ],
)
async def test_what_makes_no_sense_is_an_error_of_usage(arguments: tuple[str, ...]) -> None:
    said = await keepstep(*arguments)
    assert said.code == 2
    assert said.err.startswith("Usage:")


async def test_version_says_name_and_number() -> None:
    assert re.fullmatch(r"keepstep, version \d+\.\d+\.\d+\n", (await keepstep("--version")).out)


# ---- services


async def first_line(started: asyncio.subprocess.Process) -> str:
    assert started.stdout is not None
    async with asyncio.timeout(DEADLINE):
        return (await started.stdout.readline()).decode().strip()


async def test_a_lighthouse_says_where_it_listens_and_ends_in_good_order() -> None:
    flags = ("--bind", "127.0.0.1:0", "--min-replicas", "2", "--max-replicas", "3", "--join-timeout", "500ms")
    flags += ("--heal-timeout", "2m", "--heartbeat-timeout", "7", "--reconnect-grace", "1s", "--takeover-grace", "3")
    flags += ("--initial-replicas", "5", "--verify-every", "100", "--on-divergence", "drain")
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
        assert "it is taken" in said.err
        assert "Traceback" not in said.err
    said = await keepstep("lighthouse", "--bind", "0.0.0.0:0")
    assert said.code == 1
    assert "--insecure" in said.err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--bind", "nonsense"), "--bind 'nonsense': not an address to listen on; write host:port"),
        (("--bind", "127.0.0.1"), "--bind '127.0.0.1': not an address"),
        (("--store", "bogus://x"), "--store 'bogus://x': this is no store; use memory://"),
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
    ("flags", "code"), [(("--min-replicas", "3", "--max-replicas", "2"), 2), (("--bind", "0.0.0.0:0"), 1)]
)
async def test_a_mesh_that_cannot_start_leaves_no_folder(tmp_path: Path, flags: tuple[str, ...], code: int) -> None:
    assert (await keepstep("up", "--state-dir", str(tmp_path / "state"), *flags)).code == code
    assert not (tmp_path / "state").exists()
    (tmp_path / "mine").mkdir()
    assert (await keepstep("up", "--state-dir", str(tmp_path / "mine"), *flags)).code == code
    assert (tmp_path / "mine").exists()


async def test_an_empty_token_file_is_told_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    said = await keepstep("status", "--token-file", str(tmp_path / "token"))
    assert said.code == 2
    assert f"--token-file {tmp_path / 'token'} is empty" in said.err


async def test_a_lighthouse_listens_beyond_this_machine_when_told_to() -> None:
    async with process("lighthouse", "--bind", "0.0.0.0:0", "--insecure", "--log-level", "error") as service:
        assert (await first_line(service)).startswith("lighthouse http://0.0.0.0:")
