"""A process that a trainer forks, such as a DataLoader worker, keeps nothing of the trainer's job."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep_mesh.net.http import client_session, raise_for_problem

PROGRAM = Path(__file__).with_name("forking.py")
SECONDS = 100.0
NO_TOKEN = "no token is set service=lighthouse open_to=this machine\n"


@pytest.fixture
def scene(lighthouse: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plays a scene of ``forking.py`` and gives what it returned; nothing may have been written to standard error."""
    monkeypatch.setenv("LIGHTHOUSE", lighthouse)

    def play(name: str) -> Any:
        played = subprocess.run(
            [sys.executable, PROGRAM, name], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert (played.returncode, played.stderr.replace(NO_TOKEN, "")) == (0, "")
        return json.loads(played.stdout)

    return play


def test_a_child_and_a_child_of_it_have_no_socket_of_the_trainer(scene):
    told = scene("no_socket")
    assert told["parent"] >= 8, "sessions, servers, Gloo"
    assert told["children"] == [[], []]


def test_sockets_of_the_script_work_on_in_a_child(scene):
    assert scene("own_sockets") == ["pair", "tcp", "HTTP/1.1 200"]


def test_the_manager_says_in_a_child_whose_it_is_and_the_step_of_the_parent_commits(scene):
    told = scene("use_of_the_manager")
    beginning = f"ForkError: this Manager belongs to process {told['parent']};"
    assert [name for name, answer in told["told"].items() if not answer.startswith(beginning)] == []
    assert "create another object in the child" in told["told"]["start_quorum"]
    assert told["committed"] == [True, True]


def test_sigterm_ends_a_child(scene):
    assert scene("sigterm") == -15


def test_a_child_has_the_sigterm_handler_of_the_script(scene):
    assert scene("sigterm_of_the_script") == "own_sigterm"


@pytest.mark.parametrize("how", ["sys.exit", "os._exit", "worker"])
async def test_a_child_that_ends_says_nothing_for_its_parent(scene, lighthouse, how):
    """Nor does one hang or crash that ends as a script does."""
    assert await asyncio.to_thread(scene, f"child_exits_{how}") == [7, True]
    async with client_session() as http, http.get(f"{lighthouse}/v1/jobs/default/events") as answer:
        await raise_for_problem(answer)
        kinds = [event["kind"] for event in (await answer.json())["events"]]
    assert kinds.count("joined") == 2
    assert kinds.count("left") == 2, "the Managers of the parent, at its end"
    assert "lost" not in kinds


def test_many_forks_leave_nothing_behind(scene):
    told = scene("many")
    assert told["grown"] == 0
    assert len(told["children"]) == 1, "each child has as many descriptors as the one before"
    assert told["children"][0][0] == 0


def test_workers_that_are_forked_while_the_process_group_is_being_built_have_no_socket(scene):
    assert scene("data_loader") == [0]


def test_a_program_that_inherits_descriptors_gets_no_socket(scene):
    assert scene("executed") == "[]"


def test_a_child_may_make_a_manager_of_its_own(scene):
    assert scene("manager_of_the_child") == [True, True]


def test_a_child_has_no_socket_of_a_lighthouse_in_a_thread_of_its_parent(scene):
    sockets, error, committed = scene("lighthouse_of_the_parent")
    assert sockets == []
    assert "belongs to process" in error
    assert committed


def test_a_child_has_no_socket_of_the_store_where_ranks_meet_and_ends(scene):
    assert scene("ranks_of_one_group") == [[], 7]


def test_a_child_that_ends_does_not_wait_for_the_threads_of_a_process_group(scene):
    assert scene("process_groups_alone") == 7


def test_process_groups_in_child_processes_say_in_a_forked_child_whose_they_are_and_go_on(scene):
    told = scene("process_groups_in_children")
    owner = f"the process group belongs to process {told['parent']};"
    assert [owner in text for text in [*told["child"][::2], *told["worker"]]] == [True] * 3
    assert told["child"][1::2] == ["returned None"] * 2, "shutdown does nothing there"
    assert told["exit"] == 7
    assert told["sums"] == told["sums_after_configure"] == [2, 2]


def test_a_process_group_says_in_a_child_whose_it_is_and_deadlines_are_kept(scene):
    all_reduce, deadline = scene("rest_of_the_library")
    assert "the process group belongs to process" in all_reduce
    assert "did not complete within 0.1 s" in deadline


def test_a_child_that_a_thread_forks_is_no_different(scene):
    assert scene("from_a_thread") == [[], -15]
