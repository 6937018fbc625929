"""Replica groups of one test: each is a thread of this process with a Manager over Gloo."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from keepstep import Manager, PGTransport, ProcessGroupGloo

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


def together(*groups: Callable[[], Any]) -> list[Any]:
    """Runs each group in a thread; all results, or the first error."""
    with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
        return [one.result(60) for one in [pool.submit(group) for group in groups]]
