"""Decoupled DiLoCo merges exactly the numbers of a plain computation in one process."""

from __future__ import annotations

import concurrent.futures
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.local_sgd import Decoupled, DiLoCo
from keepstep.local_sgd.decoupled import fragment_of, share_of
from tests.unit.keepstep.local_sgd.decoupled_groups import DecoupledMember, ExpectedMerges, Round, tokens_of
from tests.unit.keepstep.local_sgd.groups import Groups, inner_of, module_of, train
from tests.unit.keepstep.local_sgd.test_blocks import make
from tests.unit.keepstep.local_sgd.test_numbers import FORMS, OUTERS


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    fragments, groups, period = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    some_values = st.lists(FORMS, min_size=1, max_size=3).filter(lambda forms: any(0 not in one for one, _ in forms))
    return {
        "forms": draw(st.lists(some_values, min_size=fragments, max_size=fragments)),
        "groups": groups,
        "period": period,
        "outer": draw(st.sampled_from(sorted(OUTERS))),
        "weight_by": draw(st.sampled_from(["steps", "tokens"])),
        "rounds": draw(
            st.lists(
                st.tuples(
                    st.sets(st.integers(0, groups - 1), min_size=1),
                    st.lists(st.integers(period, 3 * period), min_size=groups, max_size=groups),
                    st.sets(st.integers(0, groups - 1)),
                    st.sampled_from(["all", "all", "some", "lost"]),
                ),
                max_size=7,
            )
        ),
    }


def rounds_of(job: dict[str, Any], expected: ExpectedMerges) -> list[Round]:
    """Return the rounds, and compute them. A group with the newest state takes part in each, as the quorum demands."""
    rounds = []
    for taking, steps, commits, how in job["rounds"]:
        newest = expected.newest()
        if not taking & set(newest):
            taking = taking | {newest[0]}  # noqa: PLW2901
        commits = taking if how == "all" else commits & taking  # noqa: PLW2901
        one = Round({rank: steps[rank] for rank in taking}, set() if how == "lost" else commits, how == "lost")
        expected.run([one])
        rounds.append(one)
    return rounds


@settings(max_examples=60)
@given(jobs())
def test_decoupled_groups_train_the_numbers_of_a_plain_computation(job) -> None:
    """For any sizes, fragments, optimizers and weights; groups that are late, and steps that only some commit."""
    by_tokens = job["weight_by"] == "tokens"
    weigh = tokens_of if by_tokens else lambda *_: 1
    expected = ExpectedMerges(job["forms"], job["groups"], OUTERS[job["outer"]], weigh)
    rounds = rounds_of(job, expected)

    def run(rank: int) -> Any:
        member: Any = DecoupledMember(rounds, rank)
        fragments = [module_of(forms) for forms in job["forms"]]
        inner = inner_of([one for fragment in fragments for one in fragment.parameters()])
        outers = [OUTERS[job["outer"]](list(fragment.parameters())) for fragment in fragments]
        decoupled = Decoupled(weight_by=job["weight_by"], max_periods=1000)
        diloco = DiLoCo(member, fragments, inner, outers, job["period"] * len(fragments), decoupled=decoupled)
        step = 0
        with diloco:
            for one in [*member.rounds]:
                for left in reversed(range(one.inner_steps[rank])):
                    member.has_formed = left == 0
                    if by_tokens:
                        diloco.count_tokens(tokens_of(rank, step))
                    train(inner, rank, step)
                    step += 1
        return [[*one.parameters()] for one in fragments], diloco._fragments, outers, member.step

    with concurrent.futures.ThreadPoolExecutor(job["groups"]) as pool:
        ends = [one.result(60) for one in [pool.submit(run, rank) for rank in range(job["groups"])]]
    for held, (local, fragments, outers, step) in zip(expected.held, ends, strict=True):
        assert step == held.step
        torch.testing.assert_close(local, held.fragments, rtol=0, atol=0)
        assert [one.weight for one in fragments] == held.weights
        if step == expected.step:
            originals = [[*one.originals.values()] for one in fragments]
            torch.testing.assert_close(originals, [[*one] for one in expected.shared], rtol=0, atol=0)
            states = [[*one.state.values()] for one in outers]
            torch.testing.assert_close(states, [[*one.state.values()] for one in expected.outers], rtol=0, atol=0)


def test_groups_of_equal_weight_train_as_groups_that_are_not_decoupled() -> None:
    """All groups take part in each outer step, of the only fragment."""
    forms = [((5, 3), torch.float32), ((7,), torch.bfloat16)]

    def run(member: Any, **options: Any) -> list[torch.Tensor]:
        model = module_of(forms)
        inner = inner_of([*model.parameters()])
        with DiLoCo(member, [model], inner, OUTERS["nesterov"](model.parameters()), 3, **options):
            for step in range(12):
                member.has_formed = True
                train(inner, member.rank, step)
        return [one.detach() for one in model.parameters()]

    usual = Groups(3).each(run)
    rounds = [Round({0: 3, 1: 3, 2: 3}, {0, 1, 2}) for _ in range(4)]
    ExpectedMerges([forms], 3, OUTERS["nesterov"], lambda *_: 1).run(rounds)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        members = [DecoupledMember(rounds, rank) for rank in range(3)]
        merged = [one.result(60) for one in [pool.submit(run, one, decoupled=Decoupled()) for one in members]]
    torch.testing.assert_close(merged, usual, rtol=0, atol=0)


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 10**12)), min_size=1, max_size=20))
def test_an_average_of_shares_is_the_mean_weighted_by_tokens(contributions) -> None:
    total = sum(tokens for _, tokens in contributions)
    groups = len(contributions)
    average = sum(value * share_of(tokens, total, groups) for value, tokens in contributions) / groups
    weighted = sum(value * tokens for value, tokens in contributions) / total if total else 0.0
    assert average == pytest.approx(weighted, abs=1e-9)


@given(st.integers(1, 12), st.integers(0, 1000))
def test_each_turn_takes_every_fragment_once(fragments, turn) -> None:
    assert {fragment_of(turn * fragments + place, fragments) for place in range(fragments)} == set(range(fragments))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 11))
def test_a_group_that_takes_part_at_any_regular_distance_contributes_every_fragment(fragments, distance, first) -> None:
    taken = {fragment_of(step, fragments) for step in range(first, first + 400 * distance, distance)}
    assert taken == set(range(fragments))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_groups": 0}, "min_groups=0 must be at least 1"),
        ({"grace": timedelta(seconds=-1)}, "grace=-1 s must not be negative"),
        ({"max_periods": 0}, "max_periods=0 must be at least 1"),
        ({"weight_by": "loss"}, "weight_by='loss' must be 'steps' or 'tokens'"),
    ],
)
def test_a_setting_out_of_range_is_named(options, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        Decoupled(**options)


@pytest.mark.parametrize("options", [{"fragment_sync_delay": 1}, {"fragment_update_alpha": 0.5}])
def test_overlap_and_merging_by_alpha_are_refused(options) -> None:
    with pytest.raises(ValueError, match="must be 0 in decoupled groups"):
        make(DecoupledMember([], 0), decoupled=Decoupled(), **options)


def test_tokens_that_were_not_counted_or_are_no_weight_are_named() -> None:
    member = DecoupledMember([], 0)
    _, inner, diloco = make(member, decoupled=Decoupled(weight_by="tokens"))
    with pytest.raises(RuntimeError, match=r"no tokens were counted in 2 inner steps: call count_tokens\(\)"), diloco:
        train(inner, 0, 0)
        train(inner, 0, 1)
    with pytest.raises(ValueError, match="tokens=-1 must be a number from 0 on"):
        diloco.count_tokens(-1)
    with pytest.raises(RuntimeError, match=r"weighed by steps: pass Decoupled\(weight_by='tokens'\)"):
        make(DecoupledMember([], 0), decoupled=Decoupled())[2].count_tokens(1)
    with pytest.raises(RuntimeError, match=r"equal weights: pass decoupled=Decoupled\(weight_by='tokens'\)"):
        make(Groups(1).members[0])[2].count_tokens(1)


def test_groups_compare_the_settings_and_the_weights_are_in_a_checkpoint() -> None:
    member = DecoupledMember([], 0)
    _, inner, diloco = make(member, sync_every=4, decoupled=Decoupled(3, timedelta(seconds=2.5)))
    assert "decoupled min_groups 3 grace 2.5 max_periods 10 by steps" in member.layout
    with diloco:
        train(inner, 0, 0)
    saved = diloco.state_dict()
    _, _, other = make(DecoupledMember([], 0), sync_every=4, decoupled=Decoupled(3, timedelta(seconds=2.5)))
    other.load_state_dict(saved)
    assert [one.weight for one in other._fragments] == [1.0]
