"""Every kind of value on every path: it arrives exact, or is refused by name. docs/values.md has the table."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import keepstep.checkpoint
import keepstep.checkpointing
from keepstep.checkpoint.interchange import Format
from keepstep.state.errors import UnsupportedValue
from keepstep_megatron.strategies.chosen import _strategies
from keepstep_megatron.strategies.interfaces import StrategyAction
from keepstep_mesh.errors import KeepstepError
from tests.services.manager.durable.test_durable_checkpoints import run, step
from tests.services.manager.groups import manager
from tests.support.checkpoints.value_kinds import CLASSES, DENSE, ROWS, blank, plain, same, with_text_keys
from tests.support.checkpoints.value_paths import PeerRefused, RoundTrip, State, paths, scene
from tests.support.services.relay_driver import relay, relay_process

ROOT = Path(__file__).parents[3]
COLUMNS = [
    *("heal", "save", "RelayWriter", "sharded", "torch_dist"),
    *(".pt out", ".pt in", "DCP out", "DCP in", "safetensors out", "safetensors in"),
]
ARRIVES = ("exact", "plain", "text")
ENCODERS = {
    "keepstep.checkpointing.http_transport": "heal",
    "keepstep.checkpointing.pg_transport": "heal",
    "keepstep.checkpoint.managed.durable_writer": "heal",
    "keepstep.local_sgd.outer_merges": "heal",
    "keepstep.one_copy.copies.kept_bytes": "heal",
    "keepstep.checkpoint.saving": "save",
    "keepstep_megatron.strategies.native": "sharded",
    "keepstep_megatron.strategies.common_file": "torch_dist",
    "keepstep_megatron.strategies.distcp_files": "torch_dist",
    "keepstep_formats.interchange": ".pt out",
    "keepstep_formats.dcp_writing": "DCP out",
}
"""The column of each module that turns a state into bytes."""
_NAMES = ("describe", "StagingArea", "StagedParts", "save_state", "write_pickled", "save_pickled", "write_safetensors")
_ENCODES = re.compile(rf"^from [\w.]+ import .*\b({'|'.join(_NAMES)})\b", re.MULTILINE)

pytestmark = pytest.mark.filterwarnings("ignore")


def table() -> dict[str, dict[str, str]]:
    """Return the cells of the table in docs/values.md, by row and column."""
    lines = [line for line in (ROOT / "docs/values.md").read_text().splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert head[1:] == COLUMNS
    return {name: dict(zip(COLUMNS, cells, strict=True)) for name, *cells in rows}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with torch.serialization.safe_globals(CLASSES), warnings.catch_warnings():
        yield


def test_the_table_has_every_kind_and_every_path_of_the_product(tmp_path: Path) -> None:
    assert list(table()) == list(ROWS)
    transports = {
        name
        for name in keepstep.checkpointing.__all__
        if issubclass(one := getattr(keepstep.checkpointing, name), keepstep.checkpointing.CheckpointTransport)
        and one is not keepstep.checkpointing.CheckpointTransport
    }
    saves = {name for name in keepstep.checkpoint.__all__ if "save" in name or name.endswith("Writer")}
    backends = {
        action: {backend for one, backend, _ in _strategies if one is action}
        for action in (StrategyAction.SAVE_SHARDED, StrategyAction.LOAD_SHARDED, StrategyAction.SAVE_COMMON)
    }
    with scene(tmp_path / "scene", "") as one:
        known = paths(one)
    assert list(known) == COLUMNS
    assert transports == known["heal"].keys() - {"one copy"}
    assert saves == {*known["save"], *known["RelayWriter"]} - {"save at a relay"}
    assert backends[StrategyAction.SAVE_SHARDED] == {name.split()[0] for name in known["sharded"] | known["torch_dist"]}
    # zarr is read only: tests/unit/keepstep_megatron/test_zarr_checkpoints.py
    assert backends[StrategyAction.LOAD_SHARDED] == backends[StrategyAction.SAVE_SHARDED] | {"zarr"}
    assert backends[StrategyAction.SAVE_COMMON] == {"torch"}
    assert set(Format) == {Format.TORCH, Format.DCP, Format.SAFETENSORS}
    modules = {
        ".".join(path.relative_to(ROOT / "libs").with_suffix("").parts): path.read_text()
        for path in (ROOT / "libs").rglob("*.py")
        if (ROOT / "libs/keepstep/state") not in path.parents
    }
    assert {name for name, text in modules.items() if _ENCODES.search(text)} == ENCODERS.keys()


@pytest.mark.parametrize("column", COLUMNS)
async def test_every_value_arrives_exact_or_is_refused_by_name(column: str, tmp_path: Path) -> None:
    """Takes some seconds: each value that is refused is saved alone."""
    async with relay(data_dir=tmp_path / "relay") as one:
        problems = await asyncio.to_thread(check, column, tmp_path / "scene", one.address)
    assert not problems, "\n".join(problems)


def check(column: str, folder: Path, url: str) -> list[str]:
    """Return what differs from the table in one column."""
    problems: list[str] = []
    with scene(folder, url) as one:
        for name, path in paths(one)[column].items():
            of_path = DENSE if name.split()[1:2] == ["tensor"] else ROWS
            arrive: dict[str, tuple[str, str, Any]] = {}
            for row, kinds in of_path.items():
                cell = table()[row][column]
                for kind, make in kinds.items():
                    where = f"{row}: {kind}, {name}"
                    if cell in ARRIVES:
                        arrive[f"k{len(arrive)}"] = (where, "plain" if "common" in name else cell, make())
                    elif problem := alone(path, make(), cell, column, in_dict="common" in name):
                        problems.append(f"{where}: {problem}")
            problems += together(path, arrive)
    return problems


def together(path: RoundTrip, values: dict[str, tuple[str, str, Any]]) -> Iterator[str]:
    state = {key: value for key, (_, _, value) in values.items()}
    got = path(state, {key: blank(value) for key, value in state.items()})
    for key, (where, cell, value) in values.items():
        if problem := differs(value, got.get(key), cell):
            yield f"{where}: expected {cell}, but{problem}"


def differs(value: Any, got: Any, cell: str) -> str:
    if cell == "plain":
        return same(plain(value), plain(got))
    return same(with_text_keys(value), with_text_keys(got)) if cell == "text" else same(value, got)


def alone(path: RoundTrip, value: Any, cell: str, column: str, *, in_dict: bool) -> str:
    """Return what is wrong with a value that does not arrive; empty: nothing."""
    try:
        got = path({"v": value}, {"v": blank(value) if (cell, column) == ("—", "DCP out") else None})
    except PeerRefused:
        return "" if cell in ("refused", "—") else "the other program refused it"
    except Exception as error:  # noqa: BLE001  compared below
        causes: list[BaseException] = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        if cell == "—" and column == "RelayWriter":  # torch's planner
            return ""
        expected: type = KeepstepError if column == "torch_dist" or column.endswith(" in") else UnsupportedValue
        if column != "RelayWriter" and not (
            isinstance(error, KeepstepError) and any(isinstance(one, expected) for one in causes)
        ):
            return f"refused by {type(error).__name__}: {error}"
        return "" if cell in ("refused", "—") else f"expected {cell}, but refused: {error}"
    if cell == "—" or (in_dict and not differs(value, got["v"], "plain")):
        return "" if differs(value, got["v"], "exact") or in_dict else "arrives, though the table says that it does not"
    return f"expected {cell}, but it arrived"


async def test_every_value_that_heals_is_in_a_durable_checkpoint(lighthouse: str, tmp_path: Path) -> None:
    rows = table()

    def held() -> State:
        made = {
            f"{row}: {kind}": make()
            for row, kinds in ROWS.items()
            if rows[row]["heal"] == "exact"
            for kind, make in kinds.items()
        }
        return {"w": torch.zeros(1000), **made}

    def life(url: str, state: State, steps: int) -> State:
        with manager(lighthouse, "a", state, durable_relays=url, durable_every=1, init_sync=False) as one:
            one.resume()
            for _ in range(steps):
                assert step(one, state)
                one._durability._writer.finish(60)
            assert one.last_checkpoint.error == ""
        return state

    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        await run(partial(life, url, held(), 1))
        (second,) = await run(partial(life, url, {key: blank(value) for key, value in held().items()}, 0))
    assert second.pop("w").eq(1).all()
    assert not [
        f"{key}{problem}" for key, value in held().items() if key != "w" and (problem := same(value, second[key]))
    ]


async def test_a_durable_checkpoint_of_another_value_is_refused_by_name(lighthouse: str, tmp_path: Path) -> None:
    def life(url: str) -> str:
        state = {"w": torch.zeros(1000), "sparse": torch.eye(2).to_sparse()}
        with manager(lighthouse, "a", state, durable_relays=url, durable_every=1, init_sync=False) as one:
            assert step(one, state)
        return str(one.last_checkpoint.error)

    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        (error,) = await run(partial(life, url))
    assert re.search(r"\['sparse'\] is a tensor of torch\.float32, torch\.sparse_coo.*Store to_dense\(\)", error)
