"""The examples of docs/sharded.md run, and its errors are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from keepstep import sharded
from keepstep.sharded import CheckpointingException, ShardedTensor, prefixes
from keepstep.sharded.dict_utils import nested_values
from keepstep.sharded.prefixes import extract_sharded_base
from keepstep.sharded.utils import add_prefix_for_sharding
from keepstep.sharded.validation import check_integrity, row_of

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "sharded.md").read_text()
LEAVES, FACTORY, OPTIMIZER = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[:3]


@pytest.fixture(scope="module")
def example():
    names = {}
    exec(LEAVES + FACTORY, names)
    return names


def rows(state):
    return [row_of(leaf) for leaf in nested_values(extract_sharded_base(state)[0])]


def test_the_example_shards_a_layer_over_the_ranks_of_a_job(example) -> None:
    ranks = [example["sharded_state"](tp, 2, dp, 2) for tp in (0, 1) for dp in (0, 1)]
    check_integrity([rows(state) for state in ranks])
    assert ranks[2]["weight"].global_slice() == (slice(4, 8), slice(0, 8))
    problem = "chunk [4:8, 0:8] has no main replica: expected one rank that has it with replica_id 0"
    with pytest.raises(CheckpointingException, match=re.escape(f"'weight': {problem}")):
        check_integrity([rows(state) for state in ranks[:2]])
    assert problem in PAGE


def test_the_example_of_a_factory_is_put_together_again(example) -> None:
    fused = example["fused"]
    parts = fused.build()
    assert [one.key for one in parts.values()] == ["mlp.up", "mlp.down"]
    assert fused.merge_fn({name: one.data for name, one in parts.items()}).equal(fused.data)


def test_the_example_of_an_optimizer_shards_its_state() -> None:
    names = {"torch": torch, "ShardedTensor": ShardedTensor}
    exec(OPTIMIZER, names)
    leaf = names["state"]["state"][0]["exp_avg"]
    assert (leaf.key, leaf.global_shape) == ("optimizer.state.exp_avg.weight", (8, 8))
    assert f"`{leaf.key}`" in PAGE


def test_megatrons_name_of_the_module_of_prefixes_works() -> None:
    assert sharded.utils.add_prefix_for_sharding is prefixes.add_prefix_for_sharding
    assert add_prefix_for_sharding is prefixes.add_prefix_for_sharding
