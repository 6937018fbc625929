"""Ranks that share a parameter have it alike; other tensors may differ."""

from __future__ import annotations

from typing import Any

from keepstep.one_copy.recovery.compared_builds import compare


def facts(parameters: dict[str, tuple[list[int], str]], lr: str = "0.1", optimizer: str = "AdamW") -> Any:
    return {
        "all": {"optimizer": optimizer},
        "groups": [{"lr": lr}],
        "meshes": [ranks for ranks, _ in parameters.values()],
        "parameters": {name: [at, {"shape": shape}, 0] for at, (name, (_, shape)) in enumerate(parameters.items())},
    }


def whole(shape: str = "(4,)", **more: str) -> Any:
    return facts({"w": ([0, 1, 2], shape)}, **more)


NAMES = ["m0", "m1", "m2"]


def test_equal_ranks_have_no_difference() -> None:
    assert not compare([whole(), whole(), whole()], (), NAMES).odd


def test_the_value_of_most_ranks_is_right() -> None:
    verdict = compare([whole(), whole("(5,)", lr="3.0"), whole()], (), NAMES)
    assert (verdict.odd, verdict.difference) == ({1}, "shape of parameter 'w': (4,) in m0, m2, (5,) in m1")
    verdict = compare([whole(), whole(), whole(lr="3.0")], (), NAMES)
    assert (verdict.odd, verdict.difference) == ({2}, "lr of parameter 'w': 0.1 in m0, m1, 3.0 in m2")


def test_ranks_that_have_the_state_of_the_job_decide_even_if_they_are_fewer() -> None:
    sgd = whole(optimizer="SGD")
    verdict = compare([whole(), sgd, sgd], [0], NAMES)
    assert (verdict.odd, verdict.difference) == ({1, 2}, "optimizer: AdamW in m0, SGD in m1, m2")


def test_all_are_refused_without_a_majority() -> None:
    verdict = compare([whole(), whole(lr="1.0"), whole(lr="2.0")], (), NAMES)
    assert verdict.odd == {0, 1, 2}
    assert verdict.difference.endswith("; no side has a majority, so all are refused")


def test_a_parameter_that_a_rank_of_its_mesh_does_not_have_is_a_difference() -> None:
    verdict = compare([whole(), whole(), facts({})], (), NAMES)
    assert (verdict.odd, verdict.difference) == ({2}, "shape of parameter 'w': (4,) in m0, m1, missing in m2")


def test_stages_of_a_pipeline_have_parameters_of_their_own() -> None:
    first, second = facts({"w": ([0, 1], "(4,)")}), facts({"w": ([2, 3], "(9,)"), "head": ([2, 3], "(2,)")}, lr="0.5")
    names = [*NAMES, "m3"]
    assert not compare([first, first, second, second], (), names).odd
    odd = facts({"w": ([2, 3], "(9,)"), "head": ([2, 3], "(3,)")}, lr="0.5")
    assert compare([first, first, second, odd], [2], names).odd == {3}
