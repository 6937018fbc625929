"""Run a check: start its ranks, enforce its deadline, collect the results.

A rank whose peer has died may spin in a kernel for ever. Therefore each rank is the leader of a process group of its
own, and whatever is left of a check is killed at its end: no check can disturb the next one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from keepstep.coordination import LighthouseServer
from keepstep_mesh.threads.starting import Thread
from tests.gpu.check import DIGEST, Check, Outcome, Result
from tests.gpu.environment import device_of, environment_of
from tests.gpu.rank import READY, Order
from tests.gpu.starting import COLD, Process, Starter

POLL_SECONDS = 0.05
"""Interval at which the end of the ranks is checked: they are several processes, each of which may end first."""
START_SECONDS = 60.0
"""Limit for the ranks to import torch and to connect; then the deadline of the check begins."""
STACKS_SECONDS = 2.0
"""Limit for a late rank to print its stacks."""
KILL_SECONDS = 20.0
"""Limit for killed ranks to end: the driver first stops their kernels."""
NO_TIME = "no time left for it"
NOT_BEGUN = "the run ended before it"
LOG_LINES = 24
"""Last lines of a failed rank that the report has."""


class CheckFailedError(Exception):
    """A rank of the check failed, or the deadline passed."""


class NoTimeLeftError(Exception):
    """The time of the whole run is over."""


class _Ranks:
    """The processes of one check."""

    def __init__(self, check: Check, gpus: int, nccl: tuple[int, ...] | None, folder: Path, starter: Starter) -> None:
        self._check, self._gpus, self._nccl, self._folder, self._starter = check, gpus, nccl, folder, starter
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        self._lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1) if check.lighthouse else None
        self._processes: dict[int, Process] = {}
        self._lives: dict[int, int] = dict.fromkeys(range(check.ranks), 0)

    def start(self, index: int) -> None:
        check = self._check
        order = Order(
            check=check.name,
            index=index,
            ranks=check.ranks,
            device=device_of(index, self._gpus),
            store=f"127.0.0.1:{self._store.port}",
            lighthouse="" if self._lighthouse is None else self._lighthouse.address(),
            life=self._lives[index],
            result=str(self._result_of(index)),
        )
        variables = environment_of(index, check.ranks, self._gpus, self._nccl)
        self._processes[index] = self._starter.start(order, variables, self._log_of(index))

    def await_results(self) -> Result:
        """Return the result of the first rank. Raises CheckFailedError."""
        check = self._check
        awaited, has_begun = set(range(check.ranks)) - check.lost, False
        began = time.monotonic()
        deadline, end = began + START_SECONDS, began + check.whole_seconds
        while awaited:
            if not has_begun and self._store.check([f"{READY}/{index}" for index in range(check.ranks)]):
                has_begun, deadline = True, time.monotonic() + check.seconds
            for index in sorted(awaited):
                code = self._processes[index].poll()
                if code is None:
                    continue
                if code < 0 and index in check.restarted and not self._lives[index]:
                    self._lives[index] += 1
                    self.start(index)
                elif code == 0:
                    awaited.remove(index)
                else:
                    raise CheckFailedError(f"rank {index} ended with {_code(code)}:\n{self._end_of_log(index)}")
            if time.monotonic() > end:
                raise NoTimeLeftError
            if time.monotonic() > deadline:
                limit = check.seconds if has_begun else START_SECONDS
                ends = "\n".join(f"rank {one}: {self._stacks(one)}" for one in sorted(awaited))
                raise CheckFailedError(f"{'not over' if has_begun else 'not started'} within {limit:g} s\n{ends}")
            time.sleep(POLL_SECONDS)  # several processes, each of which may end first
        return self._judged()

    def _stacks(self, index: int) -> str:
        """End a rank that is late, and return where it was."""
        process = self._processes[index]
        process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STACKS_SECONDS)
        return self._end_of_log(index)

    def _judged(self) -> Result:
        results = {
            index: json.loads(self._result_of(index).read_text())
            for index in range(self._check.ranks)
            if index not in self._check.lost
        }
        digests = {index: one.pop(DIGEST) for index, one in results.items() if DIGEST in one}
        if len(set(digests.values())) > 1:
            raise CheckFailedError(f"the ranks have different weights: {digests}")
        first: Result = results[min(results)]
        return first

    def close(self) -> None:
        """Kill whatever is left."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait(KILL_SECONDS)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()

    def _result_of(self, index: int) -> Path:
        return self._folder / f"{self._check.name}-{index}.json"

    def _log_of(self, index: int) -> Path:
        return self._folder / f"{self._check.name}-{index}.log"

    def _end_of_log(self, index: int) -> str:
        lines = self._log_of(index).read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:]) or "no output"


@contextlib.contextmanager
def _started(check: Check, gpus: int, nccl: tuple[int, ...] | None, folder: Path, starter: Starter) -> Iterator[_Ranks]:
    ranks = _Ranks(check, gpus, nccl, folder, starter)
    try:
        for index in range(check.ranks):
            ranks.start(index)
        yield ranks
    finally:
        ranks.close()


def run_check(check: Check, gpus: int, nccl: tuple[int, ...] | None, folder: Path, starter: Starter = COLD) -> Outcome:
    """Run a check to its end or deadline.

    Args:
        check: the check.
        gpus: number of GPUs to use; 0: the CPU.
        nccl: version of NCCL; None: torch has none.
        folder: for logs and results of the ranks.
        starter: of the ranks.
    """
    reason = check.cannot_run or ("" if gpus else check.needs_gpu)
    if reason:
        return Outcome(check.name, check.what, "skipped", reason)
    began = time.monotonic()
    try:
        with _started(check, gpus, nccl, folder, starter) as ranks:
            figures = ranks.await_results()
    except NoTimeLeftError:
        return Outcome(check.name, check.what, "skipped", NO_TIME, round(time.monotonic() - began, 1))
    except (CheckFailedError, subprocess.TimeoutExpired) as error:
        return Outcome(check.name, check.what, "failed", str(error), round(time.monotonic() - began, 1))
    return Outcome(check.name, check.what, "passed", "", round(time.monotonic() - began, 1), figures)


def in_thread(run: Callable[[], Outcome]) -> concurrent.futures.Future[Outcome]:
    """Run a check beside the others. Its ranks end with this process at the latest."""
    found: concurrent.futures.Future[Outcome] = concurrent.futures.Future()

    def settle() -> None:
        try:
            found.set_result(run())
        except BaseException as error:  # noqa: BLE001  the waiting thread gets it
            found.set_exception(error)

    Thread(target=settle, name="keepstep-check", daemon=True).start()
    return found


def _code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
