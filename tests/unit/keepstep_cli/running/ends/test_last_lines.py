"""Facts about the end of a rank in its last lines of output."""

from __future__ import annotations

import pytest

from keepstep_cli.running.ends.last_lines import (
    MAX_CHARACTERS,
    LastLines,
    cause_of,
    exception_of,
    memory_files,
    oom_kills,
    said_by_keepstep,
)

RAISED = """\
step 7
Traceback (most recent call last):
  File "/home/me/train.py", line 30, in <module>
    main()
  File "/home/me/train.py", line 12, in main
    loss.backward()
    ^^^^^^^^^^^^^^^
  File "/opt/venv/lib/python3.11/site-packages/torch/_tensor.py", line 600, in backward
    torch.autograd.backward(
RuntimeError: bad gradient
of two lines
[W1128 22:00:00] Warning: destroy_process_group() was not called
"""
CHAINED = """\
Traceback (most recent call last):
  File "/home/me/data.py", line 3, in read
    value = row["x"]
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    read(row)
ValueError: row without x
"""
SYNTAX = """\
  File "/home/me/train.py", line 5
    if x
        ^
SyntaxError: expected ':'
"""
IN_A_LIBRARY = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/usr/lib/python3.11/site-packages/trainer/cli.py", line 4, in start
    raise SystemError("no GPU")
SystemError: no GPU
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (RAISED, "RuntimeError: bad gradient (train.py:12 main)"),
        (CHAINED, "ValueError: row without x (train.py:9 <module>)"),
        (SYNTAX, "SyntaxError: expected ':' (train.py:5)"),
        (IN_A_LIBRARY, "SystemError: no GPU (cli.py:4 start)"),
        ("step 1\nstep 2\n", ""),
        ("Traceback (most recent call last):\n", ""),
        ("", ""),
    ],
)
def test_the_exception_and_the_line_of_the_script_that_raised_it(text: str, found: str) -> None:
    assert exception_of(text.splitlines()) == found


def test_the_last_sentence_of_keepstep() -> None:
    assert said_by_keepstep(["keepstep: first", "keepstep: this machine may not join the job", "x"]).startswith("this")
    assert said_by_keepstep(["x", " keepstep: quoted"]) == ""


def test_the_newest_lines_are_kept_within_the_limit() -> None:
    lines = LastLines()
    for number in range(1000):
        lines.add(f"step {number} {'x' * 100}", error=number % 2 == 0)
    lines.add("y" * 10_000, error=False)
    assert len(lines.text) < MAX_CHARACTERS
    assert lines.text.splitlines()[-2].startswith("step 999 ")
    assert all(int(line.split()[1]) % 2 == 0 for line in lines.errors)


@pytest.mark.parametrize("name", ["HF_TOKEN", "api_key", "password", "Authorization", "AWS-SECRET-KEY"])
def test_what_looks_like_a_secret_is_hidden(name: str) -> None:
    lines = LastLines()
    lines.add(f"starting with {name}=hunter2 and more", error=True)
    lines.add(f"{name}: hunter2", error=False)
    lines.add(f'{{"{name}": "hunter2"}}', error=False)
    lines.add("tokens: 12, step 3", error=False)
    assert "hunter2" not in lines.text
    assert "hunter2" not in "".join(lines.errors)
    assert "tokens: 12, step 3" in lines.text


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        (((1, -9), (0, 75)), (1, -9)),
        (((0, 75), (1, 1)), (1, 1)),
        (((0, 75), (1, -15)), (0, 75)),
        (((0, 0), (1, -15)), (1, -15)),
        (((0, 0), (1, 0)), (0, 0)),
    ],
)
def test_the_rank_that_ended_by_itself_is_the_cause(ranks: tuple[tuple[int, int], ...], cause: tuple[int, int]) -> None:
    assert cause_of(ranks) == cause


def test_the_count_of_kills_is_found_in_both_kinds_of_cgroups() -> None:
    assert oom_kills("low 0\nhigh 0\nmax 12\noom 1\noom_kill 3\noom_group_kill 0\n") == 3
    assert oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n") == 2
    assert oom_kills("oom_kill_disable 0\nunder_oom 0\n") is None
    assert memory_files("0::/a/b\n") == ["/sys/fs/cgroup/a/b/memory.events", "/sys/fs/cgroup/memory.events"]
    assert memory_files("4:cpu,memory:/a\n0::/\n") == [
        "/sys/fs/cgroup/memory/a/memory.oom_control",
        "/sys/fs/cgroup/memory/memory.oom_control",
    ]
    assert memory_files("") == []
