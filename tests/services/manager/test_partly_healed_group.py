"""A group of two ranks of which only one healed: its state is of no step, whatever each rank holds."""

from __future__ import annotations

import threading
from typing import Any

import torch

from keepstep_mesh.errors import KeepstepError
from tests.services.manager.groups import SECOND, Flaky, manager, place_to_meet, together


def test_a_group_of_which_one_rank_healed_takes_no_part_in_a_step_without_heals(lighthouse, ended):
    places = {"a": place_to_meet(), "b": place_to_meet()}
    steps = threading.Barrier(4)
    over = {group: threading.Barrier(2) for group in places}

    def veteran(rank: int) -> None:
        with manager(lighthouse, "a", {"w": torch.ones(2)}, rank=rank, init_sync=False, **places["a"]) as m:
            m.load_state_dict({"step": 5, "batches_committed": 5, "lineage": 5})
            for heals in (True, False):
                steps.wait(30)
                m.start_quorum(allow_heal=heals)
                m.allreduce(torch.ones(1)).wait()
                m.should_commit()
            over["a"].wait(60)  # a rank that leaves in the middle of another's step fails the group

    def joiner(rank: int) -> str:
        options: dict[str, Any] = {}
        if rank == 1:
            options["checkpoint_transport"] = Flaky(timeout=20 * SECOND, num_chunks=0, hostname="127.0.0.1")
        state = {"w": torch.zeros(2)}
        with manager(lighthouse, "b", state, rank=rank, init_sync=False, **places["b"], **options) as m:
            steps.wait(30)
            m.start_quorum()
            m.allreduce(torch.ones(1)).wait()
            assert not m.should_commit()
            steps.wait(30)
            try:
                m.start_quorum(allow_heal=False)
            except KeepstepError as error:
                return str(error)
            finally:
                over["b"].wait(60)
            return ""

    *_, first, second = together(lambda: veteran(0), lambda: veteran(1), lambda: joiner(0), lambda: joiner(1))
    for error in (first, second):
        assert "left this group's state half written, and this step cannot repair it" in error
