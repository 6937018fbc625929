"""`keepstep checkpoint`: conversions through a relay, and the exit code of every failure."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from click.testing import CliRunner

from keepstep.checkpoint import save
from keepstep_cli.main import main
from tests.support.services.relay_driver import client, flip, relay, state


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def names(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()}


async def keepstep(*arguments: str) -> Said:
    """Run a command in a thread of this process: it imports torch.distributed.checkpoint only once."""
    done = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    assert isinstance(done.exception, SystemExit | None), done.exception
    return Said(done.exit_code, done.stdout, done.stderr)


async def test_checkpoints_of_a_relay_become_files_and_come_back(tmp_path: Path) -> None:
    model = {"w": torch.arange(6.0).reshape(2, 3)}
    torch.save({"model": model, "step": 3}, tmp_path / "a.pt")
    async with relay(data_dir=tmp_path / "disk") as one:
        at = ("--relay", one.address, "--job", "job")
        said = await keepstep("checkpoint", "import", f"{tmp_path}/a.pt", "c1", "--step", "3", *at)
        assert said.code == 0, said.err
        assert said.err == ""
        assert said.out == f"{tmp_path}/a.pt -> c1: 1 tensors (24 B) and 1 other values, torch\n"
        said = await keepstep("checkpoint", "export", "c1", f"{tmp_path}/m.safetensors", *at)
        assert said.code == 1
        assert "safetensors holds only tensors, and step is not" in said.err
        said = await keepstep("checkpoint", "export", "c1", f"{tmp_path}/dcp", "--json", *at)
        assert said.code == 0, said.err
        done = json.loads(said.out)
        assert (done["format"], done["tensors"], done["objects"], done["left_out"]) == ("dcp", 1, 1, [])
        url = f"{one.address}/v1/jobs/job/checkpoints/c2"
        assert (await keepstep("checkpoint", "import", f"{tmp_path}/dcp", url, *at)).code == 0
        said = await keepstep("checkpoint", "export", url, f"{tmp_path}/b.pt")
        assert said.code == 0, said.err
        found = torch.load(tmp_path / "b.pt")
        assert found["step"] == 3
        assert found["model"]["w"].equal(model["w"])
        said = await keepstep("checkpoint", "import", f"{tmp_path}/a.pt", "c1", "--step", "3", *at)
        assert said.code == 1
        assert "Checkpoint already exists" in said.err
        assert (await keepstep("checkpoint", "verify", "c2", *at)).code == 0


async def test_every_failure_has_an_exit_code_and_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / ".metadata").write_bytes(pickle.dumps(print))
    save({"w": torch.ones(100)}, tmp_path / "ours")
    flip(tmp_path / "ours" / "pack-0")
    before = names(tmp_path)
    async with relay(data_dir=tmp_path / "disk") as one, client(one.address) as worker:
        damaged = state(1)
        await worker.store(damaged, "damaged")
        at = ("--relay", one.address, "--job", "job")
        away = ("--relay", "http://127.0.0.1:1")
        target, source = f"{tmp_path}/b.pt", f"{tmp_path}/a.pt"
        cases = {
            (4, "not found"): [("show", "x"), ("verify", "x"), ("rm", "x"), ("export", "x", target)],
            (1, "refused builtins.print"): [("import", f"{tmp_path}/hostile", "c3")],
            (1, "pack"): [("export", f"{tmp_path}/ours", target)],
            (1, "exists"): [("export", f"{tmp_path}/ours", source)],
            (2, "does not exist"): [("import", f"{tmp_path}/nowhere", "c3")],
            (2, "expected http://HOST:PORT"): [("export", f"{one.address}/c1", target)],
        }
        for (code, words), commands in cases.items():
            for command in commands:
                said = await keepstep("checkpoint", *command, *at)
                assert (said.code, said.out) == (code, ""), (command, said)
                assert words in said.err, (command, said)
        for command in (("ls",), ("show", "x"), ("verify", "x"), ("rm", "x"), ("export", "x", target)):
            said = await keepstep("checkpoint", *command, *away)
            assert (said.code, said.out) == (3, ""), (command, said)
            assert "no relay answers" in said.err
        said = await keepstep("checkpoint", "import", source, "there", *away)
        assert said.code == 3
        assert "there names a checkpoint at a relay: for a directory write ./there" in " ".join(said.err.split())
        assert await worker.list() == ["damaged"]
    file = tmp_path / "disk" / "chunks" / damaged.digests[1][:2] / damaged.digests[1]
    flip(file)
    async with relay(data_dir=tmp_path / "disk") as one:
        at = ("--relay", one.address, "--job", "job")
        assert (await keepstep("checkpoint", "verify", "damaged", *at)).code == 1
        said = await keepstep("checkpoint", "export", "damaged", target, *at)
        assert (said.code, said.out) == (1, "")
        assert "a value of it has no key" in said.err
    assert names(tmp_path) == before | {"disk"}


async def test_a_checkpoint_in_a_directory_is_shown_and_verified_without_a_relay(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KEEPSTEP_LIGHTHOUSE", "http://127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    save({"w": torch.arange(3.0 * 2**20), "step": 3}, tmp_path / "ours", step=3)
    said = await keepstep("checkpoint", "show", "./ours")
    assert said.code == 0, said.err
    assert {"3", "12.0", "committed"} <= set(said.out.split())
    shown = json.loads((await keepstep("checkpoint", "show", "./ours", "--json")).out)
    assert [shown["checkpoint"][name] for name in ("step", "ranks", "bytes", "chunks")] == [3, 1, 12 << 20, 2]
    assert shown["by_rank"][0]["root"] == json.loads((tmp_path / "ours" / "checkpoint.json").read_text())["roots"][0]
    for name in ("./ours", f"file://{tmp_path}/ours"):
        said = await keepstep("checkpoint", "verify", name)
        assert (said.code, said.out) == (0, f"{name}: 2 chunks, 12.0 MiB, good\n")
    flip(tmp_path / "ours" / "pack-0")
    said = await keepstep("checkpoint", "verify", "./ours", "--json")
    assert said.code == 1
    assert [(one["rank"], one["chunk"]) for one in json.loads(said.out)["damaged"]] == [(0, 0)]
    os.truncate(tmp_path / "ours" / "pack-0", 1000)
    said = await keepstep("checkpoint", "verify", "./ours")
    assert said.code == 1
    assert f"pack-0 has 1000 bytes, expected {12 << 20}" in said.out


async def test_what_is_no_checkpoint_in_a_directory_says_what_to_do(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KEEPSTEP_LIGHTHOUSE", "http://127.0.0.1:1")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    for command in ("show", "verify"):
        for name, code, words in (
            (f"{tmp_path}/dcp", 4, "has no committed checkpoint: missing checkpoint.json; keepstep checkpoint import"),
            (f"{tmp_path}/nowhere", 4, "has no committed checkpoint"),
            ("s3://bucket/x", 1, "expected http://HOST:PORT"),
            ("ours", 3, "ours names a checkpoint at a relay: for a directory write ./ours"),
        ):
            said = await keepstep("checkpoint", command, name)
            assert (said.code, said.out) == (code, ""), (command, name, said)
            assert words in " ".join(said.err.split())
    said = await keepstep("checkpoint", "rm", f"{tmp_path}/dcp")
    assert said.code == 2
    assert "is a directory: delete it as any other" in said.err
