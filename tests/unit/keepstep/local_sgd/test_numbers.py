"""LocalSGD and DiLoCo train exactly the numbers of a plain computation in one process."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from keepstep.local_sgd import DiLoCo, LocalSGD
from tests.unit.keepstep.local_sgd.groups import Expected, Groups, Member, inner_of, module_of, train

OUTERS: dict[str, Any] = {
    "nesterov": lambda one: torch.optim.SGD(one, lr=0.7, momentum=0.9, nesterov=True),
    "adamw": lambda one: torch.optim.AdamW(one, lr=0.1),
    "sgd": lambda one: torch.optim.SGD(one, lr=1.0),
}
FORMS = st.tuples(
    st.sampled_from([(3,), (), (2, 5), (0, 4), (1,), (7, 1)]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    fragments, period = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    some_values = st.lists(FORMS, min_size=1, max_size=4).filter(lambda forms: any(0 not in one for one, _ in forms))
    return {
        "forms": draw(st.lists(some_values, min_size=fragments, max_size=fragments)),
        "groups": draw(st.integers(1, 3)),
        "sync_every": fragments * period,
        "delay": draw(st.integers(0, period - 1)),
        "alpha": draw(st.sampled_from([0.0, 0.25, 1.0])),
        "outer": draw(st.sampled_from(sorted(OUTERS))),
    }


def diloco(member: Member, fragments: list[nn.Module], job: dict[str, Any], **options: Any) -> tuple[Any, DiLoCo]:
    inner = inner_of([one for fragment in fragments for one in fragment.parameters()])
    build = OUTERS[job["outer"]]
    if options.pop("shared", False):
        outer = build([one for fragment in fragments for one in fragment.parameters()])
    else:
        outer = [build(list(fragment.parameters())) for fragment in fragments]
    manager: Any = member
    return inner, DiLoCo(
        manager,
        fragments,
        inner,
        outer,
        job["sync_every"],
        fragment_sync_delay=job["delay"],
        fragment_update_alpha=job["alpha"],
        **options,
    )


@settings(max_examples=60)
@given(
    jobs(),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5), max_size=2),
    st.sampled_from([None, 1e-5, 1]),
    st.booleans(),
)
def test_diloco_trains_the_numbers_of_a_plain_computation(job, rejected, lost, cap, shared) -> None:
    """For any sizes, fragments, delays, buckets and outer optimizers, and failures at any outer step."""
    inner_steps = 6 * job["sync_every"] // len(job["forms"])
    expected = Expected(**{**job, "outer": OUTERS[job["outer"]]}, rejected=rejected | lost)
    expected.run(inner_steps)

    def run(member: Member) -> tuple[Any, int]:
        fragments = [module_of(forms) for forms in job["forms"]]
        bucketing = {} if cap is None else {"use_bucketization": True, "bucket_cap_mb": cap}
        inner, running = diloco(member, fragments, job, shared=shared, **bucketing)
        with running:
            for step in range(inner_steps):
                train(inner, member.rank, step)
        originals = [running._fragments[number].originals.values() for number in range(len(fragments))]
        return ([list(one.parameters()) for one in fragments], [list(one) for one in originals]), member.step

    ends = Groups(job["groups"], rejected, lost).each(run)
    for group, ((local, originals), step) in enumerate(ends):
        assert step == expected.step
        torch.testing.assert_close(local, expected.locals[group], rtol=0, atol=0)
        torch.testing.assert_close(originals, expected.globals, rtol=0, atol=0)


@settings(max_examples=25)
@given(jobs(), st.sampled_from([1e-6, 2e-5, 1]))
def test_buckets_change_no_number_only_the_number_of_collectives(job, cap) -> None:
    def run(member: Member, **bucketing: Any) -> tuple[Any, int]:
        fragments = [module_of(forms) for forms in job["forms"]]
        inner, running = diloco(member, fragments, job, **bucketing)
        with running:
            for step in range(2 * job["sync_every"]):
                train(inner, member.rank, step)
        return [one.detach() for fragment in fragments for one in fragment.parameters()], len(member.reductions)

    plain = Groups(job["groups"]).each(run)
    bucketed = Groups(job["groups"]).each(lambda one: run(one, use_bucketization=True, bucket_cap_mb=cap))
    for (weights, reductions), (same, fewer) in zip(plain, bucketed, strict=True):
        torch.testing.assert_close(weights, same, rtol=0, atol=0)
        assert fewer <= reductions


@settings(max_examples=25)
@given(st.lists(FORMS, min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 4), st.sets(st.integers(0, 3)))
def test_local_sgd_averages_parameters_and_keeps_them_when_a_step_fails(forms, size, sync_every, rejected) -> None:
    references = [list(module_of(forms).parameters()) for _ in range(size)]
    inners = [inner_of(one) for one in references]
    for step in range(4 * sync_every):
        for group, inner in enumerate(inners):
            train(inner, group, step)
        if (step + 1) % sync_every == 0 and step // sync_every not in rejected:
            for same in zip(*references, strict=True):
                average = sum(one.detach() for one in same) * (1 / size)
                for one in same:
                    one.data.copy_(average)

    def run(member: Member) -> Any:
        model = module_of(forms)
        inner = inner_of(list(model.parameters()))
        manager: Any = member
        with LocalSGD(manager, model, inner, sync_every):
            for step in range(4 * sync_every):
                train(inner, member.rank, step)
        return list(model.parameters())

    for weights, expected in zip(Groups(size, rejected).each(run), references, strict=True):
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
