"""`keepstep run` with real processes. The scripts say on stdout what happens to them; nothing waits by the clock.

A script that sleeps 1000 s is a rank at work: it is there to be ended by what the test does, and no test waits for it.
"""

import asyncio
import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from keepstep_cli.running.launcher import Launcher, Program
from keepstep_cli.running.supervisor_events import GroupSpec, Restarts
from tests.support.services.command import Command

DEADLINE = 60.0


@pytest.fixture
def started(tmp_path: Path) -> Iterator[object]:
    with contextlib.ExitStack() as stack:

        def start(script: str, *flags: str, arguments: tuple[str, ...] = (), **variables: str) -> Command:
            (tmp_path / "script.py").write_text("import os, signal, subprocess, sys, time\n" + script)
            run = Command(
                tmp_path,
                "run",
                *flags,
                *(() if "--lighthouse" in flags else ("--lighthouse", "http://127.0.0.1:1")),
                "--",
                "script.py",
                *arguments,
                deadline=DEADLINE,
                **variables,
            )
            stack.callback(run.close)
            return run

        yield start


def gone(pid: int) -> bool:
    """True once it has ended; an orphan comes to the test process (see conftest), which reaps it."""
    try:
        psutil.Process(pid).wait(DEADLINE)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        return False
    return True


ENVIRONMENT = """
names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK MASTER_ADDR "
         "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_RUN_ID REPLICA_GROUP_ID NUM_REPLICA_GROUPS KEEPSTEP_LIGHTHOUSE "
         "KEEPSTEP_JOB").split()
print("environment", *(f"{name}={os.environ[name]}" for name in names), "port", int(os.environ["MASTER_PORT"]) > 0)
print("arguments", sys.argv[1:])
"""


def test_each_rank_gets_torchruns_environment_and_its_arguments(started) -> None:
    run = started(ENVIRONMENT, "--replicas", "2", "--nproc-per-replica", "2", "--job", "night", arguments=("--x", "1"))
    assert run.wait() == 0
    lines = {line for line in run.lines if "environment" in line}
    assert len(lines) == 4
    for group in "01":
        for rank in "01":
            (line,) = [one for one in lines if one.startswith(f"[r{group}/{rank}]")]
            said = dict(word.split("=", 1) for word in line.split() if "=" in word)
            assert said.pop("TORCHELASTIC_RUN_ID").startswith("night-")
            assert said == {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "ROLE_RANK": rank,
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "REPLICA_GROUP_ID": group,
                "NUM_REPLICA_GROUPS": "2",
                "KEEPSTEP_LIGHTHOUSE": "http://127.0.0.1:1",
                "KEEPSTEP_JOB": "night",
            }
            assert line.endswith("port True")
    assert sum("arguments ['--x', '1']" in line for line in run.lines) == 4


def test_groups_can_be_numbered_over_several_machines(started) -> None:
    script = 'print("I am", os.environ["REPLICA_GROUP_ID"], "of", os.environ["NUM_REPLICA_GROUPS"])'
    run = started(script, "--replicas", "2", "--first-replica", "2", "--replicas-in-job", "4")
    assert run.wait() == 0
    assert {"[r2/0] I am 2 of 4", "[r3/0] I am 3 of 4"} <= set(run.lines)


def test_spares_are_more_groups_which_know_their_number_and_the_time_of_a_notice(started) -> None:
    names = "REPLICA_GROUP_ID NUM_REPLICA_GROUPS KEEPSTEP_SPARES KEEPSTEP_NOTICE_SEC"
    script = f'print("I am", *(os.environ[name] for name in "{names}".split()))'
    numbers = ("--replicas", "1", "--spares", "1", "--replicas-in-job", "3", "--spares-in-job", "2")
    run = started(script, *numbers, "--first-replica", "2", "--notice", "30")
    assert run.wait() == 0
    assert {"[r2/0] I am 2 5 2 30.0", "[r3/0] I am 3 5 2 30.0"} <= set(run.lines)


def test_another_number_of_spares_in_the_environment_is_an_error_of_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_SPARES", "1")
    done = keepstep(tmp_path, "run", "--replicas", "2", "--", "true")
    assert done.returncode == 2
    assert "KEEPSTEP_SPARES=1 is set, and the job has 0 spares" in done.stderr


def test_a_token_reaches_the_ranks_as_a_file_that_they_can_read_again(started, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    script = 'print("token", open(os.environ["KEEPSTEP_TOKEN_FILE"]).read(), "KEEPSTEP_TOKEN" in os.environ)'
    run = started(script, "--replicas", "1", "--token-file", "token", KEEPSTEP_TOKEN="another")
    assert run.wait() == 0
    assert "[r0/0] token secret" in run.lines
    assert "[r0/0]  False" in run.lines


def test_a_killed_rank_ends_its_group_which_is_started_again_as_a_whole(started) -> None:
    script = """
again = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("pid", os.getpid(), "restart", again, flush=True)
if again == "0" and os.environ["REPLICA_GROUP_ID"] == "0":
    signal.pause()
"""
    run = started(script, "--replicas", "2", "--nproc-per-replica", "2")
    first = run.wait_for(r"\[r0/1\] pid (\d+) restart 0")
    run.seen(r"^\[r1\] ended: exit code 0")
    os.kill(int(first[1]), signal.SIGKILL)
    assert run.wait() == 0
    assert "[r0] rank 1 was killed by SIGKILL, ending the other 1" in run.lines
    assert any(re.match(r"\[r0\] restart 1 of 100 (now|in 0\.\d+ s)", line) for line in run.lines)
    assert sum("restart 1" in line and "pid" in line for line in run.lines) == 2
    assert sum(line.startswith("[r1/") for line in run.lines) == 2


def test_a_group_restarts_on_order_and_its_output_has_times_and_files(started, tmp_path: Path) -> None:
    script = 'print("run", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)\nsignal.pause()'
    flags = ("--replicas", "2", "--job", "ordered", "--timestamps", "--log-dir", str(tmp_path / "logs"))
    run = started(script, *flags)
    run.wait_for(r"^\d\d:\d\d:\d\d\.\d{3} \[r1/0\] run 0$")
    done = keepstep(tmp_path, "restart", "r1", "r9", "--job", "ordered")
    assert (done.returncode, done.stdout) == (4, "r1 restarts\n")
    assert "no group r9 here; groups of job 'ordered': r0, r1" in done.stderr
    run.wait_for(r"\[r1/0\] run 1$")
    assert sum("[r1] started, pid" in line for line in run.lines) == 1
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert (tmp_path / "logs" / "r1-0.log").read_text() == "run 0\nrun 1\n"
    assert "r1: started again, pid" in (tmp_path / "logs" / "run.log").read_text()
    assert keepstep(tmp_path, "restart", "r1", "--job", "ordered").returncode == 3


def test_a_rank_that_ignores_sigterm_is_killed_when_its_group_ends(started, tmp_path: Path) -> None:
    script = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    sys.exit(0)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
    print("deaf", flush=True)
    while True:
        signal.pause()
while not os.path.exists("go"):
    time.sleep(0.01)  # until the test, another process, creates the file
sys.exit(5)
"""
    run = started(script, "--replicas", "1", "--nproc-per-replica", "2", "--grace", "0.3")
    run.wait_for("deaf")
    (tmp_path / "go").touch()
    assert run.wait() == 0
    assert "[r0] rank 1 exited with 5, ending the other 1" in run.lines
    assert "[r0/0] no" in run.lines
    assert "[r0] still there 0.3 s after SIGTERM: killed" in run.lines


def test_a_group_is_given_up_after_max_restarts_and_the_exit_code_says_so(started) -> None:
    run = started(
        'sys.exit(7 if os.environ["REPLICA_GROUP_ID"] == "0" else 0)', "--replicas", "2", "--max-restarts", "2"
    )
    assert run.wait() == 1
    assert sum(line == "[r0] rank 0 exited with 7" for line in run.lines) == 3
    assert "[r0] given up after 2 restarts" in run.lines
    assert "[r1] ended: exit code 0" in run.lines


def test_a_code_that_would_come_again_is_that_of_the_command(started) -> None:
    run = started('sys.exit(78 if os.environ["REPLICA_GROUP_ID"] == "0" else 0)', "--replicas", "2")
    assert run.wait() == 78, "a supervisor of the command must not start it again"
    assert started("sys.exit(78)", "--replicas", "1", "--final-code", "0").wait() == 0, "docker must not start it again"
    limits = ("--replicas", "1", "--final-code", "0", "--max-restarts", "0")
    assert started("sys.exit(3)", *limits).wait() == 1, "a new start may end in another way"


CLEANLY = """
def end(*_):
    print("ended cleanly", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_all_groups_cleanly(started, signum: int, code: int) -> None:
    run = started(CLEANLY, "--replicas", "2")
    run.wait_for("ready", times=2)
    run.process.send_signal(signum)
    assert run.wait() == code
    assert {"[r0/0] ended cleanly", "[r1/0] ended cleanly"} <= set(run.lines)


def test_the_end_of_the_terminal_does_not_end_a_run_under_nohup(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import signal, sys\n{CLEANLY}")
    flags = ("--replicas", "1", "--lighthouse", "http://127.0.0.1:1", "--", "script.py")
    nohup = ("sh", "-c", 'trap "" HUP && exec "$@"', "sh")
    with contextlib.closing(Command(tmp_path, "run", *flags, deadline=DEADLINE, prefix=nohup)) as run:
        run.wait_for("ready")
        run.process.send_signal(signal.SIGHUP)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143
        assert "[r0/0] ended cleanly" in run.lines, "SIGTERM was the first signal that it has got"


class Notes:
    """Gets what the launcher says."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def line(self, group: str, rank: int, text: str, *, error: bool) -> None: ...

    def note(self, group: str, sentence: str) -> None:
        self.sentences.append(f"{group}: {sentence}")


async def test_a_restart_that_finds_no_free_port_is_tried_again_and_ends_no_other_group() -> None:
    def environments(restart: int) -> list[dict[str, str]]:
        if restart == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return [{"RESTART": str(restart)}]

    script = "import os, sys; sys.exit(os.environ['RESTART'] == '0')"
    notes = Notes()
    group = Program(GroupSpec("r0"), (sys.executable, "-c", script), environments)
    async with asyncio.timeout(DEADLINE):
        assert await Launcher([group], Restarts(), notes).run() == 0
    assert "r0: rank 0 cannot be started: [Errno 24] Too many open files" in notes.sentences


def test_without_a_folder_for_temporary_files_it_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    full = ("sh", "-c", 'ulimit -f 0 && exec "$@"', "sh")  # no file may have a byte
    run = Command(tmp_path, "run", "--replicas", "1", "--", "script.py", deadline=DEADLINE, prefix=full)
    with contextlib.closing(run):
        assert run.wait() == 1
        assert re.fullmatch(
            r"Error: No usable temporary directory found in .*; set TMPDIR to a folder .*", run.lines[-1]
        )
        assert not any("Traceback" in line for line in run.lines)


def test_a_second_ctrl_c_ends_all_at_once(started) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: print("wait a minute", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""
    run = started(script, "--replicas", "2", "--grace", "1000")
    run.wait_for("ready", times=2)
    run.process.send_signal(signal.SIGINT)
    run.wait_for("wait a minute", times=2)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "[run] ending; Ctrl-C again kills at once" in run.lines


def test_nothing_survives_the_sigkill_of_keepstep_run(started) -> None:
    run = started('print("pid", os.getpid(), flush=True)\nsignal.pause()', "--replicas", "3")
    pids = [int(run.wait_for(r"pid (\d+)")[1]) for _ in range(3)]
    run.process.kill()
    assert all(gone(pid) for pid in pids)


def test_the_children_of_a_dead_rank_end_with_it(started) -> None:
    script = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print("child", child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run = started(script, "--replicas", "1")
    child = int(run.wait_for(r"child (\d+)")[1])
    assert run.wait() == 0
    assert gone(child)


def test_lines_of_all_kinds_arrive_under_their_rank(started) -> None:
    script = r"""
sys.stdout.write("first\r\nsecond\rthird\n\n")
sys.stdout.buffer.write(b"not \xff utf-8\n" + b"x" * 100_000 + b"\n")
sys.stdout.write("no end")
sys.stdout.flush()
"""
    run = started(script, "--replicas", "1")
    assert run.wait() == 0
    lines = [line.removeprefix("[r0/0] ") for line in run.lines if line.startswith("[r0/0]")]
    assert lines[:5] == ["first", "second", "third", "", "not \ufffd utf-8"]
    assert "".join(lines[5:-1]) == "x" * 100_000
    assert lines[-1] == "no end"


def test_a_line_without_an_end_is_shown_while_the_rank_goes_on(started) -> None:
    run = started('sys.stdout.write("thinking"); sys.stdout.flush(); signal.pause()', "--replicas", "1")
    shown = run.wait_for(r"^\[r0/0\] thinking$")
    assert run.process.poll() is None, f"{shown[0]} came with the end"


def test_it_ends_when_nobody_reads_its_output(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text('while True:\n    print("y" * 999, flush=True)\n')
    command = [sys.executable, "-m", "keepstep_cli", "run", "--replicas", "2", "--lighthouse", "x:1", "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(DEADLINE) == 128 + signal.SIGPIPE
        told = ("[run] ", "[r0] started", "[r1] started")
        assert not [line for line in process.stderr if not line.startswith(told)]


def test_groups_leave_in_order_when_ctrl_c_also_ends_the_reader_of_the_output(tmp_path: Path) -> None:
    """As with ``2>&1 | tee log``: groups that still print are neither killed nor broken by the pipe."""
    script = """
import os, pathlib, signal, time
ending = []
signal.signal(signal.SIGTERM, lambda *_: ending.append(1))
print("ready", flush=True)
while not ending:
    time.sleep(0.01)  # until the signal; signal.pause() could miss it
for _ in range(200):
    print("y" * 999, flush=True)
pathlib.Path("left" + os.environ["REPLICA_GROUP_ID"]).touch()
"""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "keepstep_cli", "run", "--replicas", "2", "--lighthouse", "x:1", "script.py"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **streams) as process:
        assert process.stdout is not None
        ready: set[str] = set()
        while len(ready) < 2:
            line = process.stdout.readline()
            assert line, "the run ended early"
            ready |= {line} if line.endswith("ready\n") else set()
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        assert process.wait(DEADLINE) == 128 + signal.SIGINT
    assert sorted(one.name for one in tmp_path.glob("left*")) == ["left0", "left1"]


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_a_full_disk_under_its_output_loses_lines_and_not_the_job(tmp_path: Path, full: str) -> None:
    (tmp_path / "script.py").write_text(f'import sys\nfor _ in range(999):\n    print("y" * 999, file=sys.{full})\n')
    command = [sys.executable, "-m", "keepstep_cli", "run", "--replicas", "1", "--lighthouse", "x:1", "script.py"]
    with Path("/dev/full").open("w") as disk:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: disk}
        done = subprocess.run(command, cwd=tmp_path, **streams, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0
    if full == "stdout":
        assert done.stderr.count("cannot write to standard output (No space left on device)") == 1


def test_a_script_that_is_not_there_is_an_error_of_usage(tmp_path: Path) -> None:
    done = keepstep(tmp_path, "run", "--replicas", "1", "--", "nothing.py")
    assert done.returncode == 2
    assert "file nothing.py not found" in done.stderr


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("./nothing-at-all", "file ./nothing-at-all not found"),
        ("nosuchprog", "program nosuchprog not found on the PATH"),
        ("plain", "write ./plain for the file in the current folder"),
        ("./plain", "./plain may not be executed"),
        ("./folder", "./folder is a folder"),
    ],
)
def test_a_program_that_cannot_be_started_is_an_error_of_usage(tmp_path: Path, program: str, said: str) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "folder").mkdir()
    done = keepstep(tmp_path, "run", "--replicas", "1", "--lighthouse", "http://127.0.0.1:1", "--", program)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_program_that_is_not_there_any_more_is_given_up_at_once(tmp_path: Path) -> None:
    (tmp_path / "once").write_text("#!/bin/sh\nrm once\nexit 3\n")
    (tmp_path / "once").chmod(0o755)
    done = keepstep(tmp_path, "run", "--replicas", "1", "--lighthouse", "http://127.0.0.1:1", "--", "./once")
    assert done.returncode == 127
    assert "[r0] rank 0 cannot be started: " in done.stderr
    assert "[r0] given up: another try would end the same" in done.stderr.splitlines()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--replicas", "2", "--min-replicas", "3"), "--min-replicas 3 exceeds the 2 groups"),
        (("--replicas", "1", "--first-replica", "3", "--replicas-in-job", "2"), "--first-replica 3 and --replicas 1"),
        (("--replicas", "3", "--replicas-in-job", "2"), "ends at r1"),
        (("--replicas", "2", "--spares", "2", "--spares-in-job", "1"), "--spares 2 exceeds --spares-in-job 1"),
        (("--replicas", "2", "--spares", "1", "--first-replica", "1", "--replicas-in-job", "2"), "up to r3, but"),
        (("--replicas", "1", "--nnodes", "2", "--node-rank", "2"), "--node-rank 2 must be below --nnodes 2"),
        (("--replicas", "1", "--node-rank", "1"), "--node-rank 1 must be below --nnodes 1"),
        (("--replicas", "2", "--nnodes", "2"), "--nnodes 2 is for one group, and 2 are started here"),
        (("--replicas", "1", "--nnodes", "2", "--master-addr", "m0"), "--nnodes 2 needs --master-addr"),
    ],
)
def test_numbers_that_do_not_fit_each_other_are_an_error_of_usage(
    tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    done = keepstep(tmp_path, "run", *flags, "--", "true")
    assert done.returncode == 2
    assert said in done.stderr


def test_a_lighthouse_that_is_not_there_yet_is_said_and_no_reason_not_to_start(started) -> None:
    run = started('print("started")', "--replicas", "1")
    assert run.wait() == 0
    assert "[r0/0] started" in run.lines
    assert "[run]   http://127.0.0.1:1: nothing listens there (connection refused)" in run.lines


def test_output_of_python_is_shown_at_once_however_it_was_started(tmp_path: Path) -> None:
    code = "import signal; print('here'); signal.pause()"
    flags = ("--replicas", "1", "--lighthouse", "http://127.0.0.1:1")
    with contextlib.closing(
        Command(tmp_path, "run", *flags, "--", sys.executable, "-c", code, deadline=DEADLINE)
    ) as run:
        run.wait_for(r"^\[r0/0\] here$")
    assert "[r0/0] here" in run.lines


def test_flags_of_the_lighthouse_here_do_not_go_with_one_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    flags = ("--replicas", "1", "--min-replicas", "2", "--lighthouse", "http://127.0.0.1:1")
    done = keepstep(tmp_path, "run", *flags, "--", "script.py")
    assert done.returncode == 2
    assert "give them to that one" in done.stderr


def test_an_unknown_flag_before_the_script_is_not_taken_for_it(tmp_path: Path) -> None:
    done = keepstep(tmp_path, "run", "--replcas", "3", "script.py")
    assert done.returncode == 2
    assert "--replicas" in done.stderr


def keepstep(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "keepstep_cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE, check=False)
