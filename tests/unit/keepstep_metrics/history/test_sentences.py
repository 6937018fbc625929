"""Sentences about events."""

from __future__ import annotations

import pytest

from keepstep_metrics.history.sentences import sentence


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (4198, "4.1 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_a_heal_has_its_size_in_a_unit_that_fits(size, shown) -> None:
    told = sentence("healed", "r1", {"bytes": size, "seconds": 0.5, "via": "direct"})
    assert told == f"r1 healed: {shown} in 0.50 s, direct"


SENTENCES = [
    (
        "policy",
        {
            "by": "admin ann",
            "changed": {"takeover_grace": 30, "refuse_going_back": True},
            "before": {"takeover_grace": None, "refuse_going_back": False},
        },
        "admin ann changed the policy: takeover_grace from none to 30, refuse_going_back from false to true",
    ),
    ("verify_ordered", {"by": "admin ann", "order": 3}, "admin ann ordered a comparison of all weights"),
    (
        "replicas_verified",
        {"step": 7, "groups": 2, "missing": ["r2:a"], "order": 0},
        "the weights of 2 groups are equal after step 7; not compared: r2",
    ),
    (
        "replicas_differ",
        {"step": 7, "groups": 3, "missing": [], "diverged": ["r1:a"], "action": "heal"},
        "the weights of the groups differ after step 7: r1 from the majority; action: heal",
    ),
    (
        "replicas_differ",
        {"step": 7, "groups": 2, "missing": [], "diverged": [], "action": "nothing: no state has a majority"},
        "the weights of the groups differ after step 7; action: nothing: no state has a majority",
    ),
    (
        "exposed",
        {"reason": "its keeper r2:a has no copies: no memory"},
        "r1 is exposed: its keeper r2:a has no copies: no memory",
    ),
    ("covered", {"keepers": "r2:a"}, "r1 is no longer exposed: r2 has its copies"),
    (
        "world_formed",
        {"how": "resized", "ranks": 6, "former_ranks": 8, "step": 7, "seconds": 0.25},
        "the members train on at step 7: resized from 8 to 6 ranks in 0.25 s",
    ),
    (
        "world_formed",
        {"how": "resumed", "ranks": 8, "step": 5, "seconds": 1.5, "went_back": 3},
        "the members train on at step 5: resumed with 8 ranks in 1.50 s; 3 steps are lost",
    ),
    ("shards_lost", {"step": 9}, "shards are lost at step 9: members were lost together with their keepers"),
    ("heal_given_up", {"failed_heals": 2}, "r1 took too long to heal"),
    (
        "runtime_differs",
        {"runtime": "Python 3.12", "others": "Python 3.11"},
        "r1 runs Python 3.12; the other groups run Python 3.11",
    ),
    (
        "quorum_id_raised",
        {"quorum_id": 9},
        "a group had seen quorum 9, which the store of the lighthouse does not hold",
    ),
]


@pytest.mark.parametrize(("event", "detail", "told"), SENTENCES)
def test_a_sentence_has_what_an_operator_asks_first(event, detail, told) -> None:
    assert sentence(event, "r1", detail) == told


@pytest.mark.parametrize("event", [event for event, _, _ in SENTENCES])
def test_an_event_of_another_version_without_its_details_has_a_sentence_too(event) -> None:
    assert sentence(event, "r1", {"changed": 1, "missing": 2})
