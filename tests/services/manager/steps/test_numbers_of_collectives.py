"""Groups that begin different numbers of collectives in a step end with a reason, and do not stall."""

from __future__ import annotations

import json
import threading
import urllib.request

import torch

from keepstep_mesh.exit_codes import EXIT_COLLECTIVES_DIFFER
from tests.services.manager.groups import SECOND, manager, together


def test_a_group_with_another_number_of_collectives_ends_and_the_others_go_on(lighthouse):
    ready = threading.Barrier(3)

    def group(name: str, at_step_2: int) -> tuple[object, str]:
        with manager(lighthouse, name, {"w": torch.zeros(1)}, min_replica_size=2, timeout=3 * SECOND) as m:
            try:
                ready.wait(30)
                while m.current_step() < 6:
                    m.start_quorum()
                    for _ in range(at_step_2 if m.current_step() == 2 else 2):
                        m.allreduce(torch.ones(4))
                    m.should_commit()
            except SystemExit as end:
                return end.code, str(end)
            return "step", str(m.current_step())

    ended = together(lambda: group("a", 2), lambda: group("b", 3), lambda: group("c", 2))
    assert (ended[0], ended[2]) == (("step", "6"), ("step", "6"))
    code, reason = ended[1]
    assert code == EXIT_COLLECTIVES_DIFFER
    assert "a:" in reason or "c:" in reason
    assert "completed it with 2" in reason
    assert "began 3; call manager.allreduce equally often" in reason
    with urllib.request.urlopen(f"{lighthouse}/v1/jobs/default/events", timeout=30) as answer:
        events = json.load(answer)["events"]
    (event,) = [one["detail"] for one in events if one["kind"] == "collectives_differ"]
    assert event["reason"] == reason
    assert [name[:1] for name in event["ended"]] == ["b"]
    assert (event["step"], event["completed"], list(event["began"].values())) == (2, 2, [3])
