"""`.ci/run` runs failed tests once more, alone: that hides no test that fails twice, and names one that fails once."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.services.command import environment

PASSES = "def test_passes():\n    pass\n"
FAILS = "def test_fails():\n    raise ValueError\n"
ONCE = """
from pathlib import Path
import pytest

def fails_once(name):
    if not Path(name).exists():
        Path(name).touch()
        raise ValueError

def test_once():
    fails_once("call")

@pytest.fixture
def ends():
    yield
    fails_once("teardown")

def test_ends(ends):
    pass
"""
MANY = "import pytest\n@pytest.mark.parametrize('number', range(4))\ndef test_many(number):\n    raise ValueError\n"
STOPS = FAILS + "def test_stops():\n    raise KeyboardInterrupt\n"


@pytest.mark.parametrize(
    ("tests", "code", "runs", "unstable"),
    [
        (PASSES, 0, 1, []),
        (PASSES + ONCE, 0, 2, ["test_all.py::test_ends", "test_all.py::test_once"]),
        (FAILS + ONCE, 1, 2, ["test_all.py::test_ends", "test_all.py::test_once"]),
        (MANY, 1, 1, []),
        (STOPS, 2, 1, []),
        ("import nothing", 2, 1, []),
    ],
    ids=["all pass", "some fail once", "one fails twice", "too many fail", "interrupted", "not collected"],
)
def test_a_failed_test_runs_once_more(
    tmp_path: Path, repository: Path, tests: str, code: int, runs: int, unstable: list[str]
) -> None:
    (tmp_path / "test_all.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    pytest_run = (sys.executable, "-m", "pytest", "-p", "xdist", "-n", "0", "--dist", "loadfile", "test_all.py")
    done = subprocess.run(
        [sys.executable, repository / ".ci" / "second_chance", *pytest_run],
        cwd=tmp_path,
        env=environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.count("test session starts") == runs
    named = [line.rpartition(" ")[2] for line in done.stdout.splitlines() if "UNSTABLE" in line]
    assert named == unstable


def test_ci_gives_a_second_chance_and_make_test_does_not(repository: Path) -> None:
    assert "test SECOND_CHANCE=.ci/second_chance" in (repository / ".ci" / "run").read_text()
    assert "@$(SECOND_CHANCE) $(BIN)/python -m pytest" in (repository / "Makefile").read_text()
