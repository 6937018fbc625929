"""`keepstep run` and the lighthouse: the one that it is given, the one that it starts."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from keepstep_cli.asking.rest import Lighthouse
from keepstep_cli.running import embedded
from keepstep_cli.running.bans import ask_ban
from keepstep_cli.running.supervisor_events import BanLearned
from keepstep_mesh.exit_codes import EXIT_SCRIPT_FAILS
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.security.tokens import Tokens
from tests.services.cli.scene import ADMIN, WORKER, keepstep, line_of, running
from tests.support.services.command import process

EVICTED_ONCE = """
import os, pathlib, sys
pathlib.Path(os.environ["KEEPSTEP_NAME_FILE"]).write_text("train_ddp_1")
sys.exit(77 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""


async def test_run_asks_for_a_ban_by_the_name_that_the_group_has_at_the_lighthouse(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EVICTED_ONCE)
    async with running("train_ddp_1") as job:
        assert (await keepstep("evict", "train_ddp_1", "--ban", "10m", "--yes", *job.at)).code == 0
        async with process("run", "--replicas", "1", *job.at, "--", str(tmp_path / "script.py")) as run:
            said = await line_of(run.stderr, "not started again")
            assert said.rstrip().endswith("`keepstep readmit train_ddp_1` ends that")
            assert (await keepstep("readmit", "train_ddp_1", *job.at)).code == 0
            await line_of(run.stderr, "[r0] ended: exit code 0")


async def test_a_ca_file_that_was_removed_leaves_a_ban_unknown_and_ends_nothing(tmp_path: Path) -> None:
    asked = Lighthouse("https://127.0.0.1:1", None, TlsFiles(ca=tmp_path / "gone.pem"))
    assert await ask_ban(asked, "default", tmp_path, "r0") == BanLearned("r0", None, "r0")


async def test_a_script_with_an_error_is_given_up_before_the_first_step_and_restarted_after_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import train_of_mine\n")
    async with running() as job:
        said = await keepstep("run", "--replicas", "2", *job.at, "--", str(tmp_path / "script.py"))
        assert said.code == EXIT_SCRIPT_FAILS
        assert said.err.count("/0] ModuleNotFoundError: No module named 'train_of_mine'") == 2 * 3
        assert said.err.count("the job has not committed a step; correct the error above") == 2
    async with running("a") as job:
        limit = ("--max-restarts", "4", "--max-restart-pause", "0.1")
        said = await keepstep("run", "--replicas", "1", *limit, *job.at, "--", str(tmp_path / "script.py"))
        assert said.code == 1
        assert "given up after 4 restarts" in said.err


async def test_a_script_with_an_error_is_given_up_after_three_times_while_the_own_lighthouse_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text("import train_of_mine\n")
    said = await keepstep("run", "--replicas", "1", "--max-restart-pause", "0", "--", str(tmp_path / "script.py"))
    assert said.code == EXIT_SCRIPT_FAILS
    assert said.err.count("/0] ModuleNotFoundError: No module named 'train_of_mine'") == 3


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
        assert f"The token came from the file {tmp_path / 'token'}." in said.err
        said = await keepstep("run", "--replicas", "1", *job.at, "--", "echo", "started", KEEPSTEP_TOKEN=WORKER)
        assert (said.code, said.out) == (0, "[r0/0] started\n")


async def test_the_usual_port_is_taken_if_it_is_free_and_a_lighthouse_there_is_told() -> None:
    async with running() as job:
        taken = int(job.lighthouse.address.rpartition(":")[2])
        port, other = await asyncio.to_thread(embedded.place, taken)
        assert port != taken
        assert other == job.lighthouse.address
    assert embedded.place(taken) == (taken, None)
    assert embedded.place(taken)[0] != taken, "another run is about to start its lighthouse there"
    embedded._claims.pop().close()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port, other = embedded.place(silent.getsockname()[1])
        assert other is None
