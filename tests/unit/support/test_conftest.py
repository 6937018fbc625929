"""The leak check of tests/conftest.py, run on tests that leak."""

import re
import subprocess
import sys
from pathlib import Path

LEAKS = """
import asyncio, logging, socket, subprocess, threading
kept = []
def test_thread():
    threading.Thread(target=threading.Event().wait, daemon=True, name="forgotten").start()
async def test_task():
    kept.append(asyncio.create_task(asyncio.sleep(100)))
def test_child():
    kept.append(subprocess.Popen(["sleep", "100"]))
def test_orphan():
    subprocess.run(["sh", "-c", "sleep 101 >/dev/null 2>&1 &"], check=True)
def test_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))
def test_log_handler():
    logging.getLogger().addHandler(logging.StreamHandler())
"""

NAMED = {
    "test_thread": "thread 'forgotten'",
    "test_task": "task ",
    "test_child": "process ",
    "test_orphan": "sleep 101",
    "test_socket": "LISTEN",
    "test_log_handler": "log handler",
}

CLEAN = """
import asyncio, socket, subprocess, threading, time
def test_a_thread_that_ends_soon():
    threading.Thread(target=time.sleep, args=(0.05,)).start()
async def test_a_task_that_ends_soon():
    asyncio.create_task(asyncio.sleep(0.05)).add_done_callback(lambda _: None)
async def test_a_thread_of_the_loop_and_a_child():
    await asyncio.to_thread(time.sleep, 0.01)
    await (await asyncio.create_subprocess_exec("true")).wait()
def test_a_socket_that_is_closed():
    socket.create_server(("127.0.0.1", 0)).close()
"""


def run_under_conftest(folder: Path, repository: Path, source: str, grace: float) -> subprocess.CompletedProcess[str]:
    conftest = (repository / "tests" / "conftest.py").read_text()
    assert "GRACE_SECONDS = 20.0" in conftest
    (folder / "conftest.py").write_text(conftest.replace("GRACE_SECONDS = 20.0", f"GRACE_SECONDS = {grace}"))
    (folder / "test_leak.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "asyncio_mode=auto", "-o", f"pythonpath={repository}", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder, check=False)


def test_each_leak_fails_its_own_test_by_name(tmp_path: Path, repository: Path) -> None:
    done = run_under_conftest(tmp_path, repository, LEAKS, grace=0.2)
    assert done.returncode == 1, done.stdout
    assert f"{len(NAMED)} passed, {len(NAMED)} errors" in done.stdout
    for test, leak in NAMED.items():
        report = done.stdout.partition(f"ERROR at teardown of {test} ")[2].partition("ERROR at teardown")[0]
        found = re.search(r"the test left behind:\n  (.*)", report)
        assert found is not None and leak in found[1], done.stdout  # noqa: PT018


def test_a_thread_or_task_that_ends_in_time_is_no_leak(tmp_path: Path, repository: Path) -> None:
    done = run_under_conftest(tmp_path, repository, CLEAN, grace=5.0)
    assert done.returncode == 0, done.stdout
