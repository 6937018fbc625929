"""Replica groups of one test: each is a thread of this process with a Manager over Gloo."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import HTTPTransport, Manager, PGTransport, ProcessGroupGloo
from keepstep.runtime.exits import MismatchExit
from keepstep.state.errors import TransferError
from tests.support.network.ports import free_port

SECOND = timedelta(seconds=1)


def events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


@contextmanager
def manager(
    lighthouse: str,
    name: str | None,
    state: dict[str, Any] | None = None,
    *,
    heal_over_pg: bool = False,
    **options: Any,
) -> Iterator[Manager]:
    held = state if state is not None else {}
    pg = options.pop("pg", None) or ProcessGroupGloo(timeout=20 * SECOND)
    if heal_over_pg:
        options["checkpoint_transport"] = PGTransport(pg, 20 * SECOND, torch.device("cpu"))
    one = Manager(
        pg,
        load_state_dict=held.update,
        state_dict=lambda: dict(held),
        lighthouse_addr=lighthouse,
        replica_id=name,
        **{"timeout": 20 * SECOND, "quorum_timeout": 30 * SECOND, **options},
    )
    try:
        yield one
    finally:
        one.shutdown()


def until_connected(lighthouse: str, name: str, *, asked: bool = False) -> None:
    """Return when the lighthouse knows the group, or has a request of it: the first quorum of other groups has it."""
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"{lighthouse}/v1/jobs/default/replicas/{name}", timeout=30) as answer:
                if json.load(answer)["address"] or not asked:
                    return
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} has not {'asked' if asked else 'connected'}")
        time.sleep(0.01)  # nothing tells a client of the lighthouse that a group has connected


def together(*groups: Callable[[], Any]) -> list[Any]:
    """Runs each group in a thread; all results, or the error that came first: those of the others follow from it.

    Groups that still wait after a minute end when the managers of the test are shut down.
    """
    pool = concurrent.futures.ThreadPoolExecutor(len(groups))
    with warnings.catch_warnings():
        # torch changes the filters of the whole process in each thread: one would raise what another one ignores
        warnings.simplefilter("ignore")
        running = [pool.submit(group) for group in groups]
        ended, _ = concurrent.futures.wait(running, 60, concurrent.futures.FIRST_EXCEPTION)
        failed = [one for one in ended if one.exception() is not None]
        concurrent.futures.wait(running, 60)
    pool.shutdown(wait=False)
    return [one.result(0) for one in failed or running]


def refusal(lighthouse: str, member: Callable[[Manager], object], newcomer: Callable[[Manager], object]) -> str:
    """Train a group, and return the error of another one that does not fit. Both run their function before the step."""
    ready, done = threading.Barrier(2), threading.Event()

    def train() -> None:
        with manager(lighthouse, "a") as m:
            member(m)
            m.start_quorum()
            assert m.should_commit()
            ready.wait(30)
            assert done.wait(30)

    def join() -> str:
        ready.wait(30)
        with manager(lighthouse, "b") as m:
            newcomer(m)
            try:
                with pytest.raises(MismatchExit) as refused:
                    m.start_quorum()
                return str(refused.value)
            finally:
                done.set()

    _, message = together(train, join)
    return str(message)


def place_to_meet() -> dict[str, Any]:
    """A free port for the store that rank 0 serves."""
    return {"store_addr": "127.0.0.1", "store_port": free_port(), "world_size": 2}


class Flaky(HTTPTransport[dict[str, Any]]):
    """One of its heals fails, before it has touched any state."""

    tries, fails_at = 0, 1

    def recv_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        self.tries += 1
        if self.tries == self.fails_at:
            raise TransferError("a hiccup", torn=False)
        return super().recv_checkpoint(*args, **options)


def change_policy(lighthouse: str, **changes: float) -> None:
    """Change the policy of the job."""
    body, headers = json.dumps(changes).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{lighthouse}/v1/jobs/default", body, headers, method="PATCH")
    urllib.request.urlopen(request, timeout=30).close()
