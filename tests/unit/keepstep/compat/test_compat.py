"""``keepstep.compat``: ``import torchft`` imports keepstep, in this process and in those that a script starts."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import pickle
import pkgutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import keepstep
from keepstep import compat
from keepstep.compat import __main__ as command_line
from keepstep.compat import finder
from keepstep.compat.finder import MegatronFinder, TorchftFinder
from keepstep.coordination import LighthouseServer


def forget() -> None:
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, TorchftFinder | MegatronFinder)]
    for name in [one for one in sys.modules if one.partition(".")[0] in ("torchft", "megatron")]:
        del sys.modules[name]
    LighthouseServer.default_join_timeout_ms = None


@pytest.fixture(autouse=True)
def activated() -> Iterator[None]:
    """``import keepstep.compat`` as in a new process."""
    forget()
    compat._activate()
    yield
    forget()


def test_torchft_is_found_before_it_is_imported() -> None:
    assert importlib.util.find_spec("torchft").submodule_search_locations == keepstep.__path__
    assert importlib.util.find_spec("torchft.manager").origin == importlib.util.find_spec("keepstep.manager").origin
    assert "torchft.manager" not in sys.modules
    importlib.import_module("torchft")
    assert importlib.util.find_spec("torchft") is not None


TORCHFT: dict[str, Any] = json.loads((Path(__file__).parents[4] / "docs" / "torchft_names.json").read_text())


@pytest.mark.parametrize("name", ["", ".checkpointing", *(f".{one}" for one in TORCHFT if one not in finder.MODULES)])
def test_a_module_of_torchft_is_the_module_of_keepstep(name: str) -> None:
    module = importlib.import_module(f"torchft{name}")
    assert module is importlib.import_module(f"keepstep{name}")
    assert module.__name__ == module.__spec__.name == f"keepstep{name}"


def test_names_import_as_scripts_for_torchft_write_it() -> None:
    names: dict[str, Any] = {}
    exec(
        textwrap.dedent("""
        import torchft as ft
        import torchft.checkpointing.pg_transport
        from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
        from torchft import ProcessGroupBabyNCCL, ProcessGroupBabyXCCL, ProcessGroupNCCL, ProcessGroupXCCL
        from torchft import process_group
        from torchft.manager import WorldSizeMode
        from torchft.process_group import ManagedProcessGroup
        """),
        names,
    )
    assert names["ft"].process_group is names["process_group"]
    assert names["Manager"] is keepstep.Manager
    assert names["ManagedProcessGroup"] is keepstep.ManagedProcessGroup
    assert names["ft"].Optimizer is keepstep.OptimizerWrapper


def test_the_classes_of_torchfts_extension_are_those_of_coordination() -> None:
    extension = importlib.import_module("torchft._torchft")
    assert extension is importlib.import_module("keepstep.coordination")
    assert extension.__spec__.name == "keepstep.coordination"
    with pytest.raises(ImportError, match=r"has no coordination\.Timestamp"):
        exec("from torchft._torchft import Timestamp")


def test_the_lighthouse_of_a_script_for_torchft_waits_as_there_for_a_group_that_does_not_ask() -> None:
    limit = timedelta(seconds=30)
    coordination = importlib.import_module("torchft.coordination")
    server = coordination.LighthouseServer("127.0.0.1:0", min_replicas=2, heartbeat_timeout_ms=120_000)
    client = coordination.LighthouseClient(server.address(), limit)
    try:
        client.heartbeat("does not ask")
        with ThreadPoolExecutor(2) as pool:
            for asked in [pool.submit(client.quorum, name, limit) for name in "ab"]:
                assert [one.replica_id for one in asked.result(60).participants] == ["a", "b"]
    finally:
        client.shutdown()
        server.shutdown()


def test_pickles_that_name_torchft_load() -> None:
    mode = keepstep.WorldSizeMode.DYNAMIC
    old = pickle.dumps(mode, 0).replace(keepstep.WorldSizeMode.__module__.encode(), b"torchft.manager")
    assert b"torchft.manager" in old
    assert pickle.loads(old) is mode  # bytes that this test has made
    assert pickle.loads(pickle.dumps(importlib.import_module("torchft").Manager)) is keepstep.Manager


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in finder.NAMES for name in finder.NAMES[module]]
)
def test_a_name_that_keepstep_does_not_have_is_refused_with_what_to_use_instead(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=f"has no {module}.{name}: {finder.NAMES[module][name].split('(')[0]}"):
        exec(f"from torchft.{module} import {name}")
    found = importlib.import_module(f"torchft.{module}")
    assert name not in dir(found)


def test_a_module_or_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ModuleNotFoundError, match="has no module 'otel': KEEPSTEP_OTEL") as refused:
        importlib.import_module("torchft.otel")
    assert refused.value.name == "torchft.otel"
    with pytest.raises(ModuleNotFoundError, match="has no module 'foo': docs"):
        exec("import torchft.foo.bar")
    with pytest.raises(ModuleNotFoundError, match="is not a package"):
        exec("import torchft.manager.foo")
    with pytest.raises(ImportError, match="cannot import name 'Nothing' from 'keepstep'"):
        exec("from torchft import Nothing")
    with pytest.raises(ImportError, match=r"cannot import name 'Nothing' from 'keepstep\.manager'"):
        exec("from torchft.manager import Nothing")
    assert not hasattr(importlib.import_module("torchft.manager"), "Nothing")
    assert not hasattr(importlib.import_module("torchft"), "Nothing")


def test_threads_that_import_at_once_get_the_same_module() -> None:
    ready, found = threading.Barrier(8), []

    def load(number: int) -> None:
        name = "torchft.manager" if number % 2 else "keepstep.manager"
        ready.wait(30)
        module = importlib.import_module(name)
        found.append((module, module.Manager, module.__spec__.name))

    for _ in range(20):
        for name in ("torchft", "torchft.manager"):
            sys.modules.pop(name, None)
        threads = [threading.Thread(target=load, args=(number,)) for number in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(30)
    assert len(found) == 160
    assert {(module, manager) for module, manager, _ in found} == {(sys.modules["keepstep.manager"], keepstep.Manager)}
    assert sys.modules["keepstep.manager"].__spec__.name == "keepstep.manager"


def test_a_reload_and_a_walk_over_the_modules_load_nothing_twice() -> None:
    torchft = importlib.import_module("torchft")
    assert importlib.reload(torchft) is keepstep
    importlib.reload(compat)
    assert sum(isinstance(one, TorchftFinder) for one in sys.meta_path) == 1
    names = [one.name for one in pkgutil.walk_packages(torchft.__path__, "torchft.")]
    assert {"torchft.manager", "torchft.checkpointing.http_transport"} <= set(names)
    loaded = [one for one in names if one in sys.modules]
    assert loaded
    assert all(sys.modules[one] is sys.modules["keepstep" + one.removeprefix("torchft")] for one in loaded)


def test_another_torchft_that_is_imported_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("torchft")
    other.__file__ = "/site-packages/torchft/__init__.py"
    monkeypatch.setitem(sys.modules, "torchft", other)
    with pytest.raises(ImportError, match=r"already, from /site-packages/.*: import keepstep\.compat before"):
        compat._activate()


def test_a_variable_of_torchft_without_effect_is_logged(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_USE_OTEL", "true")
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "30")
    with caplog.at_level(logging.WARNING):
        importlib.import_module("torchft.manager")
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("variable of torchft has no effect variable=TORCHFT_USE_OTEL reason=KEEPSTEP_OTEL exports")


@pytest.mark.parametrize(
    ("original", "arguments", "expected"),
    [
        ("python -m keepstep.compat train.py -m x", "train.py -m x", "PYTHON train.py -m x"),
        ("python3 -W error -um keepstep.compat -m titan", "-m titan", "PYTHON -W error -u -m titan"),
        ("python -X dev -mkeepstep.compat train.py", "train.py", "PYTHON -X dev train.py"),
        ("python -Bmkeepstep.compat -c pass", "-c pass", "PYTHON -B -c pass"),
    ],
)
def test_the_command_line_keeps_the_options_of_python(original: str, arguments: str, expected: str) -> None:
    assert command_line.command("PYTHON", original.split(), arguments.split()) == expected.split()


def test_the_folder_is_put_in_front_of_pythonpath_once() -> None:
    folder = str(command_line.FOLDER)
    assert command_line.environment({"A": "1"}) == {"A": "1", "PYTHONPATH": folder}
    assert command_line.environment({"PYTHONPATH": f"x:{folder}::y"})["PYTHONPATH"] == f"{folder}:x:y"


SCRIPT = """
import importlib.util, multiprocessing, subprocess, sys

def check(where):
    print(where, importlib.util.find_spec("torchft") is not None, flush=True)
    import torchft.coordination, keepstep.coordination
    print(where, torchft is keepstep, torchft.coordination is keepstep.coordination, flush=True)

if __name__ == "__main__":
    check(f"script {sys.argv[1:]}")
    child = multiprocessing.get_context("spawn").Process(target=check, args=("spawned",))
    child.start()
    child.join()
    subprocess.run([sys.executable, "-c", "import torchft.coordination as c; print('child', c.__name__)"], check=True)
"""


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100, check=False)
    return done.stdout + done.stderr


def test_an_unchanged_script_and_its_children_import_keepstep(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    printed = python("-W", "error", "-m", "keepstep.compat", str(script), "--lr", "1")
    assert printed.splitlines() == [
        "script ['--lr', '1'] True",
        "script ['--lr', '1'] True True",
        "spawned True",
        "spawned True True",
        "child keepstep.coordination",
    ]


def test_the_command_prints_its_folder_and_refuses_an_option_that_disables_it() -> None:
    assert python("-m", "keepstep.compat").strip() == str(command_line.FOLDER)
    assert "instead of  python train.py" in python("-m", "keepstep.compat", "--help")
    run = "import runpy; runpy.run_module('keepstep.compat', run_name='__main__')"
    start = f"import sys; sys.path[:0], sys.argv = {sys.path}, ['-m', 'train.py']; {run}"
    assert "Python ignores PYTHONPATH because of its option -E" in python("-E", "-c", start)
