"""The groups of a world of two ranks. The second one connects, and takes part in nothing."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from keepstep.one_copy.core.mesh_shape import MeshShape
from keepstep.one_copy.world.world_groups import OUTSIDE, WorldGroups
from keepstep.process_group import ProcessGroupGloo

MINUTE = timedelta(minutes=1)


@pytest.fixture
def groups() -> Iterator[WorldGroups]:
    made = WorldGroups(MeshShape({"fsdp": -1}), "cpu", MINUTE)
    stores = [dist.HashStore() for _ in range(3)]
    others = [ProcessGroupGloo(timeout=MINUTE) for _ in stores]

    def join() -> None:
        for number, (group, store) in enumerate(zip(others, stores, strict=True)):
            group.configure(f"{number}", "m1", 1, 2, 1, 0, 1, [0, 1], store=store, host="127.0.0.1")

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join)
        made.configure(0, 2, 1, lambda number: stores[number], host="127.0.0.1", name="m0")
        joining.result()
    yield made
    made.shutdown()
    for group in others:
        group.shutdown()


def synchronous() -> None:
    dist.all_reduce(torch.ones(3))


def waited() -> None:
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def future() -> None:
    dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()


def functional() -> None:
    _functional_collectives.all_reduce(torch.ones(3), "sum", dist.distributed_c10d._get_default_group()).sum()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("collective", [synchronous, waited, future, functional])
def test_an_error_of_a_collective_outside_of_an_attempt_says_what_to_do(
    groups: WorldGroups, collective: Callable[[], None], begun: bool
) -> None:
    """Whether the loss is known when the collective begins, or ends it."""
    lost = threading.Timer(0.2, groups.abort, ("m1 is lost",))
    lost.start()
    if not begun:
        lost.join()
    with pytest.raises(Exception, match="m1 is lost") as outside:
        collective()
    lost.join()
    assert outside.value.__notes__ == [OUTSIDE]
    groups.in_attempt = True
    with pytest.raises(Exception, match="m1 is lost") as inside:
        collective()
    assert not hasattr(inside.value, "__notes__"), "the attempt handles it"
