"""Memory that is available to this process, from the files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.runtime.host_memory import UNLIMITED, available_bytes, ranks_of_host
from keepstep.state import restoring
from keepstep.state.pack_layout import describe
from keepstep.state.restoring import Destination
from keepstep_mesh.errors import ManifestError

GB = 1 << 30


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 * GB // 1024} kB\nMemAvailable: {40 * GB // 1024} kB\n")
    return tmp_path


def test_without_groups_the_machine_limits_and_an_unknown_system_does_not(machine, tmp_path) -> None:
    assert available_bytes(machine) == 40 * GB
    assert available_bytes(tmp_path / "nothing") == UNLIMITED


@pytest.mark.parametrize("parent_limit", ["max", str(9 * GB)])
def test_a_group_of_version_2_limits_and_so_does_its_parent(machine, parent_limit) -> None:
    write(machine, "proc/self/cgroup", "0::/pod/trainer\n")
    group = "sys/fs/cgroup/pod"
    write(machine, f"{group}/memory.max", parent_limit)
    write(machine, f"{group}/memory.current", str(6 * GB))
    write(machine, f"{group}/trainer/memory.max", str(8 * GB))
    write(machine, f"{group}/trainer/memory.current", str(5 * GB))
    write(machine, f"{group}/trainer/memory.stat", f"anon 1\ninactive_file {GB}\n")
    assert available_bytes(machine) == (4 * GB if parent_limit == "max" else 3 * GB)


def test_a_group_of_version_1_limits_also_where_the_path_is_that_of_the_host(machine) -> None:
    write(machine, "proc/self/cgroup", "5:devices:/x\n4:memory:/docker/1f2e\n0::/\n")
    write(machine, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(8 * GB))
    write(machine, "sys/fs/cgroup/memory/memory.usage_in_bytes", str(7 * GB))
    write(machine, "sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {2 * GB}\n")
    assert available_bytes(machine) == 3 * GB


def test_a_group_that_uses_more_than_its_limit_leaves_nothing(machine) -> None:
    write(machine, "proc/self/cgroup", "0::/\n")
    write(machine, "sys/fs/cgroup/memory.max", str(GB))
    write(machine, "sys/fs/cgroup/memory.current", str(2 * GB))
    assert available_bytes(machine) == 0


def test_this_machine_has_memory() -> None:
    assert 0 < available_bytes() < UNLIMITED


@pytest.mark.parametrize(("told", "ranks"), [("8", 8), ("0", 1), ("many", 1), ("", 1)])
def test_the_launcher_tells_the_number_of_ranks_of_this_host(told, ranks, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert ranks_of_host() == ranks


def test_a_state_that_does_not_fit_is_refused_and_one_that_may_not_fit_for_all_ranks_is_logged(monkeypatch) -> None:
    content = describe({"bytes": bytes(10_000)}).content
    monkeypatch.setattr(restoring, "available_bytes", lambda: 9_999)
    with pytest.raises(ManifestError, match="needs 10000 bytes, 9999 are available"):
        Destination(content)
    monkeypatch.setattr(restoring, "available_bytes", lambda: 15_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    logged: list[str] = []
    monkeypatch.setattr(restoring, "log", type("Log", (), {"warning": lambda _, text, **_rest: logged.append(text)})())
    Destination(content)
    assert logged == ["too little memory, if each rank of this host receives as much"]
