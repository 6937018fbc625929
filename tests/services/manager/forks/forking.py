"""A trainer that forks: ``python forking.py SCENE``; prints what happened as one JSON object.

Two groups, each a Manager of this process, so that the connections between them are here too.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).parents[4]))

from keepstep import Manager, ProcessGroupGloo
from keepstep.coordination import LighthouseServer
from keepstep.futures import context_timeout, future_timeout
from keepstep.process_group import ProcessGroupBabyGloo
from keepstep.rendezvous.store_client import KeyValueServer, RendezvousStore, Table
from tests.support.processes.children import DEADLINE, descriptors, fork_and_exit, in_child, sockets, wait

SECOND = timedelta(seconds=1)


class Group:
    """``wait_for``: groups that take part in each step."""

    def __init__(self, name: str, lighthouse: str, wait_for: int = 2, **options: Any) -> None:
        self.state = {"weight": torch.zeros(1)}
        self.manager = Manager(
            ProcessGroupGloo(timeout=20 * SECOND),
            load_state_dict=self.state.update,
            state_dict=lambda: dict(self.state),
            lighthouse_addr=lighthouse,
            replica_id=name,
            min_replica_size=wait_for,
            timeout=20 * SECOND,
            quorum_timeout=30 * SECOND,
            **options,
        )

    def step(self) -> bool:
        self.manager.start_quorum()
        self.manager.allreduce(torch.ones(4)).wait()
        return self.manager.should_commit()


class Pair:
    def __init__(self, lighthouse: str) -> None:
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.a = Group("a", lighthouse)
        self.b = Group("b", lighthouse)
        self.replica_ids = [self.a.manager.replica_id(), self.b.manager.replica_id()]

    def step(self) -> None:
        """Run steps until both commit; the first quorum may be without one of them."""
        for _ in range(10):
            other = self.pool.submit(self.b.step)
            if all([self.a.step(), other.result(DEADLINE)]):
                return
        raise RuntimeError("no step was committed")

    def steps(self, count: int = 3) -> None:
        for _ in range(count):
            self.step()

    def shutdown(self) -> None:
        self.a.manager.shutdown()
        self.b.manager.shutdown()
        self.pool.shutdown()


# ---- scenes, whose results are printed


def no_socket(pair: Pair) -> Any:
    """Of the child, and of a child of it."""
    mine = len(sockets())
    children = in_child(lambda: [sockets(), in_child(sockets)])
    pair.steps()
    return {"parent": mine, "children": children}


def own_sockets(pair: Pair) -> Any:
    """The script's own work on in the child: TCP, to the lighthouse too, a listener, a pair."""
    address = os.environ["LIGHTHOUSE"].rpartition("/")[2].rpartition(":")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as accepted,
        socket.create_connection((address[0], int(address[2]))) as lighthouse,
    ):
        left, right = socket.socketpair()

        def use() -> Any:
            left.sendall(b"pair")
            client.sendall(b"tcp")
            lighthouse.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with socket.create_connection(listener.getsockname()), listener.accept()[0]:
                return [right.recv(4).decode(), accepted.recv(3).decode(), lighthouse.recv(12).decode()]

        result = in_child(use)
        left.close()
        right.close()
    pair.steps()
    return result


def use_of_the_manager(pair: Pair) -> Any:
    manager = pair.a.manager
    pair.a.manager.start_quorum()  # a step is open
    other = pair.pool.submit(pair.b.step)
    calls: dict[str, Callable[[], object]] = {
        "start_quorum": manager.start_quorum,
        "wait_quorum": manager.wait_quorum,
        "allreduce": lambda: manager.allreduce(torch.ones(1)),
        "should_commit": manager.should_commit,
        "current_step": manager.current_step,
        "num_participants": manager.num_participants,
        "participating_rank": manager.participating_rank,
        "state_dict": manager.state_dict,
        "replica_id": manager.replica_id,
        "errored": manager.errored,
        "report_error": lambda: manager.report_error(RuntimeError("x")),
        "record": lambda: manager.record(loss=1.0),
        "allow_state_dict_read": manager.allow_state_dict_read,
        "mark_torn": manager.mark_torn,
    }

    def use() -> dict[str, str]:
        told = {}
        for name, call in calls.items():
            try:
                told[name] = f"returned {call()}"
            except Exception as error:  # noqa: BLE001  the test looks at it
                told[name] = f"{type(error).__name__}: {error}"
        manager.shutdown()
        return told

    told = in_child(use)
    manager.allreduce(torch.ones(4)).wait()
    committed = [manager.should_commit(), other.result(DEADLINE)]
    pair.steps()
    return {"told": told, "parent": os.getpid(), "committed": committed}


def sigterm(pair: Pair) -> Any:
    """To a child of a parent with two Managers."""
    ready, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(theirs, b"x")
            time.sleep(DEADLINE)  # until SIGTERM ends it
        finally:
            os._exit(1)
    os.read(ready, 1)
    os.kill(pid, signal.SIGTERM)
    code = wait(pid)
    pair.steps()
    return code


def sigterm_of_the_script(pair: Pair) -> Any:
    """A handler that the script installed before its Managers is the child's again."""
    return in_child(lambda: signal.getsignal(signal.SIGTERM).__name__)  # type: ignore[union-attr]


def own_sigterm(_number: int, _frame: object) -> None:
    """The script's handler."""


def child_exits(pair: Pair, *, how: str) -> Any:
    """A child that ends as a script does, with finalization and atexit, or at once."""
    pid = os.fork()
    if pid == 0:
        if how == "os._exit":
            os._exit(7)
        if how == "worker":
            multiprocessing.get_context("fork").Process(target=int).start()
        sys.exit(7)
    code = wait(pid)
    pair.steps()
    return [code, pair.a.manager.replica_id() == pair.replica_ids[0]]


def many(pair: Pair) -> Any:
    pair.step()
    before = descriptors()
    children = {json.dumps(in_child(lambda: [len(sockets()), descriptors()])) for _ in range(30)}
    pair.steps()
    return {"grown": descriptors() - before, "children": [json.loads(one) for one in children]}


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return len(sockets())


def data_loader(pair: Pair) -> Any:
    """Epoch after epoch, each with new workers, while a step is open whose process group is being built."""
    seen: set[int] = set()
    for _ in range(3):
        other = pair.pool.submit(pair.b.step)
        pair.a.manager.start_quorum()
        for batch in DataLoader(Numbers(), 4, num_workers=2, multiprocessing_context="fork"):
            seen.update(batch.tolist())
        pair.a.manager.allreduce(torch.ones(4)).wait()
        pair.a.manager.should_commit()
        other.result(DEADLINE)
    pair.steps()
    return sorted(seen)


def executed(pair: Pair) -> Any:
    """A program that is started with all descriptors has none of ours."""
    told = subprocess.run(
        [sys.executable, __file__, "sockets"], close_fds=False, capture_output=True, text=True, check=True
    )
    pair.steps()
    return told.stdout.strip()


def manager_of_the_child(pair: Pair) -> Any:
    """The child trains with a Manager that it makes."""

    def train() -> Any:
        os.environ["KEEPSTEP_JOB"] = "child"
        before = signal.getsignal(signal.SIGTERM)
        group = Group("child", os.environ["LIGHTHOUSE"], wait_for=1)
        group.manager.start_quorum(timeout=10 * SECOND)
        committed = group.manager.should_commit()
        group.manager.shutdown()
        return [committed, signal.getsignal(signal.SIGTERM) == before]

    answer = in_child(train)
    pair.steps()
    return answer


def lighthouse_of_the_parent(pair: Pair) -> Any:
    """The child holds no socket of a lighthouse in a thread of its parent, and cannot use it."""
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    os.environ["KEEPSTEP_JOB"] = "another"
    group = Group("c", server.address(), wait_for=1)

    def use() -> Any:
        try:
            server.shutdown()
        except RuntimeError as error:
            return [sockets(), str(error)]
        return [sockets(), "no error"]

    told = in_child(use)
    committed = group.step()
    group.manager.shutdown()
    server.shutdown()
    return [*told, committed]


def ranks_of_one_group(pair: Pair) -> Any:
    """With the store where they meet, which rank 0 serves."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = {"store_addr": "127.0.0.1", "store_port": probe.getsockname()[1], "world_size": 2}
    first = pair.pool.submit(Group, "ranks", os.environ["LIGHTHOUSE"], 1, rank=0, **place)
    second = Group("ranks", os.environ["LIGHTHOUSE"], 1, rank=1, **place)
    ranks = [first.result(DEADLINE), second]
    told = [in_child(sockets), wait(fork_and_exit())]
    for rank in ranks:
        rank.manager.shutdown()
    pair.steps()
    return told


def process_groups_alone(pair: Pair) -> Any:
    """Without a Manager; the child frees them when it ends as a script does."""
    groups = [ProcessGroupGloo(timeout=20 * SECOND) for _ in range(2)]
    server = KeyValueServer()

    def configure(rank: int) -> None:
        store = RendezvousStore("http://127.0.0.1:1", timeout=20 * SECOND, server=server)
        groups[rank].configure("", "r", rank, 2, store=store, host="127.0.0.1")

    other = pair.pool.submit(configure, 1)
    configure(0)
    other.result(DEADLINE)
    told = wait(fork_and_exit())
    for group in groups:
        group.shutdown()
    pair.steps()
    return told


class Sums(Dataset[str]):
    """The error of a worker that uses the process group of the trainer."""

    def __init__(self, group: ProcessGroupBabyGloo) -> None:
        self.group = group

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return error_of(lambda: self.group.allreduce([torch.ones(1)]))


def error_of(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()}"
    except Exception as error:  # noqa: BLE001  the test looks at it
        return f"{type(error).__name__}: {error}"


def process_groups_in_children(pair: Pair) -> Any:
    """Process groups whose backend runs in a child process, and that nothing else of this process uses."""
    groups = [ProcessGroupBabyGloo(timeout=60 * SECOND) for _ in range(2)]
    server = KeyValueServer()

    def configure(rank: int, quorum: int) -> None:
        store = RendezvousStore("http://127.0.0.1:1", Table(quorum_id=quorum), timeout=60 * SECOND, server=server)
        groups[rank].configure("", "r", rank, 2, store=store, host="127.0.0.1")

    def reduce(group: ProcessGroupBabyGloo) -> float:
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        return tensor.item()

    def both(call: Callable[[Any], Any], *of: Any) -> list[Any]:
        other = pair.pool.submit(call, of[1])
        return [call(of[0]), other.result(60)]

    def use() -> list[str]:
        calls = [call for one in groups for call in (partial(one.allreduce, [torch.ones(1)]), one.shutdown)]
        return [error_of(call) for call in calls]

    both(partial(configure, quorum=1), 0, 1)
    told = {
        "parent": os.getpid(),
        "child": in_child(use),
        "exit": wait(fork_and_exit()),
        "worker": next(iter(DataLoader(Sums(groups[0]), num_workers=1, multiprocessing_context="fork"))),
        "sums": both(reduce, *groups),
    }
    both(partial(configure, quorum=2), 0, 1)
    told["sums_after_configure"] = both(reduce, *groups)
    for group in groups:
        group.shutdown()
    pair.steps()
    return told


def rest_of_the_library(pair: Pair) -> Any:
    """Process groups are of no use in a child, which says so; deadlines work, although their thread is the parent's."""
    group = cast("ProcessGroupGloo", pair.a.manager._context.reconfigurer.pg)

    def use() -> Any:
        told = []
        for call in (
            lambda: group.allreduce([torch.ones(1)]),
            lambda: future_timeout(torch.futures.Future(), SECOND / 10).wait(),
        ):
            try:
                told.append(f"returned {call()}")
            except Exception as error:  # noqa: BLE001  the test looks at it
                told.append(f"{type(error).__name__}: {error}")
        group.shutdown()
        return told

    with context_timeout(lambda: None, 60 * SECOND):
        told = in_child(use)
    pair.steps()
    return told


def from_a_thread(pair: Pair) -> Any:
    told: list[Any] = []
    forking = threading.Thread(target=lambda: told.extend([in_child(sockets), sigterm(pair)]))
    forking.start()
    forking.join()
    return told


SCENES: dict[str, Callable[[Pair], Any]] = {
    scene.__name__: scene
    for scene in (
        no_socket, own_sockets, use_of_the_manager, sigterm, sigterm_of_the_script, many, data_loader, executed,
        manager_of_the_child, lighthouse_of_the_parent, ranks_of_one_group, process_groups_alone,
        process_groups_in_children, rest_of_the_library, from_a_thread,
    )
}  # fmt: skip
SCENES |= {f"child_exits_{how}": partial(child_exits, how=how) for how in ("sys.exit", "os._exit", "worker")}


def main() -> None:
    scene = sys.argv[1]
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # Python 3.12: a fork of several threads
    if scene == "sockets":
        print(sockets())
        return
    torch.set_num_threads(1)
    if scene == "sigterm_of_the_script":
        signal.signal(signal.SIGTERM, own_sigterm)
    pair = Pair(os.environ["LIGHTHOUSE"])
    pair.steps()
    told = SCENES[scene](pair)
    pair.shutdown()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
