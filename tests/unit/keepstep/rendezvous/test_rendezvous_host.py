"""Which member of a quorum hosts the rendezvous: the same in all plans, another after each failure."""

from __future__ import annotations

from keepstep.group.quorum_plan import make_plan
from keepstep_mesh.protocol.membership import Member, MemberInfo
from keepstep_mesh.protocol.messages import Quorum


def plans(quorum_id: int, versions: dict[str, int], step_of_c: int = 5) -> set[str]:
    """The hosts in the plans of all members."""
    members = tuple(
        Member(
            name, step_of_c if name == "c" else 5, 3, 0, False, MemberInfo(f"at {name}", f"at {name}", rendezvous=own)
        )
        for name, own in versions.items()
    )
    quorum = Quorum(0, 1, quorum_id, 0, 0, 5, 3, 0, False, members)
    return {make_plan(quorum, name).store_address for name in versions}


def test_each_quorum_id_has_another_host_and_all_members_know_the_same():
    assert [plans(quorum_id, {"a": 2, "b": 2, "c": 2}) for quorum_id in range(4)] == [
        {"at a"},
        {"at b"},
        {"at c"},
        {"at a"},
    ]


def test_a_group_that_heals_can_be_the_host():
    assert plans(2, {"a": 2, "b": 2, "c": 2}, step_of_c=0) == {"at c"}


def test_beside_a_member_that_knows_only_the_first_of_the_cohort_all_meet_there():
    assert [plans(quorum_id, {"a": 2, "b": 1, "c": 2}) for quorum_id in range(3)] == [{"at a"}] * 3
