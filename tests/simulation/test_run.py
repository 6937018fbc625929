"""Long runs of the simulation, in blocks of seeds that a file lists once they finished."""

from __future__ import annotations

from pathlib import Path

from tests.simulation.run import BLOCK, SIMULATORS, Block, blocks, finished, run


def test_seeds_are_divided_into_blocks_of_each_simulator_in_turn() -> None:
    found = list(blocks(("plain", "ports"), None, range(BLOCK - 2, BLOCK + 3)))
    parts = [(BLOCK - 2, 2), (BLOCK - 2, 2), (BLOCK, 3), (BLOCK, 3)]
    assert [(one.start, one.seeds) for one in found] == parts
    assert [one.simulator for one in found] == ["plain", "ports"] * 2


def test_a_run_leaves_out_the_blocks_that_an_earlier_one_finished(tmp_path: Path) -> None:
    state = tmp_path / "state"
    known, new = Block("plain", 1, 0, 2), Block("ports", 1, 0, 1)
    state.write_text('{"block": ["plain", 1, 0, 2], "failed": []}\n{"block": ["pla')
    assert finished(state) == {known}
    state.write_text('{"block": ["plain", 1, 0, 2], "failed": []}\n')
    assert run([known, new], 1, SIMULATORS, state) == 0
    assert finished(state) == {known, new}
