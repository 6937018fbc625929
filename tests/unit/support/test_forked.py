"""A process from a fork server is like one that Python starts."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from execnet.gateway_io import popen_args
from execnet.xspec import XSpec

from tests.support.processes import forked
from tests.support.services.command import Command

PROGRAM = Path(__file__).with_name("told_by_a_process.py")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[forked.ForkServer]:
    """A fork server for scripts, which has imported nothing."""
    one = forked.ForkServer()
    monkeypatch.setitem(forked.SERVERS, "scripts", one)
    yield one
    one.close()


def ended(popen: type[subprocess.Popen[str]], folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``PROGRAM``."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")} | {"A": "é"}
    pipe = subprocess.PIPE
    with popen(
        [sys.executable, str(PROGRAM), *arguments], cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        stdout, stderr = process.communicate("a line\n", 60)
        return process.returncode, stdout, stderr


def test_a_forked_script_sees_what_a_started_one_sees_and_ends_as_it_does(server, tmp_path: Path) -> None:
    forked_one, started = (ended(one, tmp_path, "x", "y z") for one in (forked.ForkedPopen, forked.UsualPopen))
    assert server.process is not None
    told, expected = (json.loads(one[1].splitlines()[0]) for one in (forked_one, started))
    assert told == expected
    assert forked_one == started
    assert (started[0], told["arguments"], told["stdin"]) == (7, ["x", "y z"], "a line\n")
    assert (told["parent"], told["environment"]["A"]) == (os.getpid(), "é")
    assert started[1].endswith("at exit\n")


def test_an_error_and_a_signal_end_a_forked_script(server, tmp_path: Path) -> None:
    code, _, stderr = ended(forked.ForkedPopen, tmp_path, "fail")
    assert code == 1
    assert stderr.endswith("RuntimeError: fail\n")
    assert ended(forked.ForkedPopen, tmp_path, "interrupt")[0] == -signal.SIGINT
    assert server.process is not None


TRAINER = """
import json, os, signal, sys
told = {"forked": "colorsys" in sys.modules, "pid": os.getpid(), "parent": os.getppid(), "arguments": sys.argv[1:]}
print(json.dumps(told | {"session": os.getsid(0), "inherits": "TESTS_FORK_SERVER" in os.environ}))
signal.pause()
"""


def test_trainers_of_a_command_are_forked_are_its_children_and_die_with_it(monkeypatch, tmp_path: Path) -> None:
    server = forked.ForkServer("colorsys")
    monkeypatch.setitem(forked.SERVERS, "scripts", server)
    (tmp_path / "train.py").write_text(TRAINER)
    command = ["run", "--replicas", "1", "--lighthouse", "x:1", "--", "train.py", "a"]
    run = Command(tmp_path, *command, deadline=60.0, **{forked.FORKS: "1"})
    try:
        told = json.loads(run.wait_for(r"\[r0/0\] ({.*})")[1])
        trainer = os.pidfd_open(told["pid"])
        assert told == {
            "forked": True, "pid": told["pid"], "parent": run.process.pid, "arguments": ["a"], "session": told["pid"],
            "inherits": False,
        }  # fmt: skip
        run.process.kill()
        assert select.select([trainer], [], [], 30)[0], "the trainer lives on"
        os.close(trainer)
    finally:
        run.close()
        server.close()


WORKER = """
import os, subprocess, sys
from tests.support.processes import forked
forked.install()
script = "import os, sys  # as a script with torch" + chr(10) + "print('colorsys' in sys.modules, os.getppid())"
serving = ("-m", "timeit", "-n1", "-r1", "import subprocess; print(subprocess.Popen.__name__)")
def told(*arguments, **variables):
    run = [sys.executable, *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.split()
print("colorsys" in sys.modules, told("-c", script) == ["True", str(os.getpid())], end=" ")
print(told(*serving, TESTS_FORK_SERVER="1")[0], *forked.server_pids(), *sys.argv)
"""


def test_a_process_of_xdist_is_forked_and_has_a_fork_server_for_its_scripts(monkeypatch, repository: Path) -> None:
    server = forked.ForkServer("colorsys")
    monkeypatch.setitem(forked.SERVERS, "workers", server)
    pipe = subprocess.PIPE
    command = popen_args(XSpec("popen"))
    try:
        with forked.ForkedPopen(command, cwd=repository, stdin=pipe, stdout=pipe, text=True) as worker:
            told, _ = worker.communicate(f"{WORKER!r}\n", 60)
        assert server.process is not None
        assert re.fullmatch(r"True True ForkedPopen \d+ -c\n", told), told
    finally:
        server.close()


def test_other_flags_and_variables_of_python_start_a_python_of_their_own() -> None:
    command = [sys.executable, "-m", "keepstep_cli", "--version"]
    assert forked.server_of(command) is forked.SERVERS["commands"]
    assert forked.server_of([sys.executable, "-X", "dev", *command[1:]]) is None
    assert forked.same_python(os.environ)
    assert not forked.same_python(os.environ | {"PYTHONHASHSEED": "1"})
