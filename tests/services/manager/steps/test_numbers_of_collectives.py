"""Groups that begin different numbers of collectives in a step end with a reason, and do not stall."""

from __future__ import annotations

import json
import re
import threading
import urllib.request

import pytest
import torch

from keepstep_mesh.exit_codes import EXIT_COLLECTIVES_DIFFER
from tests.services.manager.groups import SECOND, manager, together


@pytest.mark.parametrize("times", [1, 100], ids=["once", "always"])
def test_a_group_that_twice_begins_another_number_of_collectives_ends_and_the_others_go_on(lighthouse, times):
    ready = threading.Barrier(3)

    def group(name: str, extra: int) -> tuple[object, str]:
        with manager(lighthouse, name, {"w": torch.zeros(1)}, min_replica_size=2, timeout=2 * SECOND) as m:
            try:
                ready.wait(30)
                while m.current_step() < 6:
                    m.start_quorum()
                    differs = extra > 0 and m.current_step() >= 2
                    extra -= differs
                    for _ in range(3 if differs else 2):
                        m.allreduce(torch.ones(4))
                    m.should_commit()
            except SystemExit as end:
                return end.code, str(end)
            return "step", str(m.current_step())

    a, b, c = together(lambda: group("a", 0), lambda: group("b", times), lambda: group("c", 0))
    assert a == c == ("step", "6")
    with urllib.request.urlopen(f"{lighthouse}/v1/jobs/default/events", timeout=30) as answer:
        events = [one["detail"] for one in json.load(answer)["events"] if one["kind"] == "collectives_differ"]
    assert [(one["completed"], *one["began"].values()) for one in events] == [(2, 3)] * len(events)
    if times == 1:
        assert b == a
        assert [one["ended"] for one in events] == [[]]
        return
    code, reason = b
    assert code == EXIT_COLLECTIVES_DIFFER
    assert reason == events[-1]["reason"]
    assert "completed it with 2, b:" in re.sub(r"b:\S+", "b:", reason)
    assert "began 3; call manager.allreduce equally often" in reason
    assert [[name[:1] for name in one["ended"]] for one in events] == [[], ["b"]]
