"""Real groups over Gloo train the numbers of a plain computation in one process, bit for bit."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from keepstep.local_sgd import DiLoCo
from tests.services.manager.groups import manager, together
from tests.unit.keepstep.local_sgd.groups import Expected, inner_of, module_of, train

FORMS = [
    [((3,), torch.float32), ((2, 5), torch.float64), ((0, 4), torch.float32)],
    [((40, 9), torch.bfloat16), ((), torch.float32), ((7, 1), torch.float32)],
]
INNER_STEPS, PERIOD = 20, 4


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("bucketing", [{}, {"use_bucketization": True, "bucket_cap_mb": 1}], ids=["plain", "buckets"])
def test_two_groups_train_the_numbers_of_a_plain_computation(lighthouse, bucketing) -> None:
    """A sum of two numbers does not depend on their order, so that the numbers are equal bit for bit."""
    expected = Expected(FORMS, groups=2, sync_every=2 * PERIOD, delay=1, alpha=0.5, outer=nesterov, rejected={2})
    expected.run(INNER_STEPS)
    ready = threading.Barrier(2)

    def run(rank: int) -> Any:
        with manager(lighthouse, f"g{rank}", min_replica_size=2, use_async_quorum=False) as m:
            fragments = [module_of(forms) for forms in FORMS]
            for number, fragment in enumerate(fragments):
                m.register_state_dict_fn(f"model{number}", fragment.load_state_dict, fragment.state_dict)
            inner = inner_of([one for fragment in fragments for one in fragment.parameters()])
            outers = [nesterov(fragment.parameters()) for fragment in fragments]
            diloco = DiLoCo(
                *(m, fragments, inner, outers, 2 * PERIOD),
                fragment_sync_delay=1,
                fragment_update_alpha=0.5,
                **bucketing,
            )
            ready.wait(60)
            with diloco:
                diloco.begin()  # no forward pass does
                for step in range(INNER_STEPS):
                    if step == 3 * PERIOD - 1:
                        m.report_error(RuntimeError("this outer step fails in all groups"))
                    train(inner, rank, step)
            ready.wait(60)
            assert m.current_step() == expected.step == 4
            return [list(fragment.parameters()) for fragment in fragments]

    for group, weights in enumerate(together(lambda: run(0), lambda: run(1))):
        torch.testing.assert_close(weights, expected.locals[group], rtol=0, atol=0)
