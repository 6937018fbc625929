"""The queue of saves in the background: their order, their errors, and its end."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import pytest
import torch

from keepstep.sharded import (
    AsyncCallsQueue,
    AsyncRequest,
    CheckpointingException,
    ShardedTensor,
    check_is_distributed_checkpoint,
    load_plain_tensors,
    save,
)

SECONDS = 60
"""Deadline of waits for an event."""


class Log(list):
    """Requests that write their names here. They wait for ``go`` first if it is given."""

    def request(self, name, go=None, **fields):
        def write(*arguments):
            self.append(f"{name} begins")
            assert go is None or go.wait(SECONDS)
            self.append((name, *arguments) if arguments else f"{name} ends")

        return AsyncRequest(write, fields.pop("async_fn_args", ()), [lambda: self.append(f"{name} final")], **fields)


def test_a_persistent_queue_runs_one_request_after_another() -> None:
    log, go, queue = Log(), threading.Event(), AsyncCallsQueue(persistent=True)
    assert queue.schedule_async_request(log.request("a", go)) == 0
    assert queue.schedule_async_request(log.request("b")) == 1
    assert queue.maybe_finalize_async_calls() == []
    assert queue.get_num_unfinalized_calls() == 2
    go.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    ran = [one for one in log if not one.endswith("final")]
    assert ran == ["a begins", "a ends", "b begins", "b ends"]
    assert [one for one in log if one.endswith("final")] == ["a final", "b final"]
    queue.close()
    assert queue.schedule_async_request(log.request("c")) == 2
    queue.close()
    queue.close(abort=True)
    assert log[-1] == "c final"


def test_requests_of_a_plain_queue_run_at_once_and_are_finalized_in_order() -> None:
    log, go, queue = Log(), threading.Event(), AsyncCallsQueue()
    queue.schedule_async_request(log.request("a", go))
    ended = threading.Event()
    queue.schedule_async_request(AsyncRequest(ended.set, (), [lambda: log.append("b final")]))
    assert ended.wait(SECONDS), "it does not wait for the other"
    assert queue.maybe_finalize_async_calls() == [], "the first is finalized first"
    go.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert log == ["a begins", "a ends", "a final", "b final"]


@pytest.mark.parametrize("is_sync", [True, False])
def test_the_copy_of_preload_takes_the_place_of_the_second_argument_at_the_call(is_sync) -> None:
    log, values = Log(), torch.ones(1)
    request = log.request("a", async_fn_args=(0, values, 2), preload_fn=values.clone)
    if is_sync:
        request.execute_sync()
    else:
        queue = AsyncCallsQueue(persistent=True)
        queue.schedule_async_request(request)
        values.zero_()
        queue.close()
    assert log == ["a begins", ("a", 0, torch.ones(1), 2), "a final"]
    short = log.request("b", async_fn_args=(0,), preload_fn=lambda: 1)
    with pytest.raises(CheckpointingException, match="async_fn_args has 1 values, but the result of preload_fn"):
        short.execute_sync()


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("place", ["async_fn", "preload_fn"])
def test_an_error_is_raised_when_the_request_is_finalized_and_the_next_one_is_not_lost(persistent, place) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no space left")

    log, queue = Log(), AsyncCallsQueue(persistent=persistent)
    broken = log.request("a", async_fn_args=(1, 2), what="/checkpoints/8 was not saved")._replace(**{place: fails})
    assert queue.schedule_async_request(broken) == 0
    assert queue.schedule_async_request(log.request("b")) == 1
    with pytest.raises(CheckpointingException, match="/checkpoints/8 was not saved: OSError: no space left"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert "a final" not in log
    queue.close()


class OtherRequest(NamedTuple):
    """A request as older versions of Megatron Core, and other libraries, have it."""

    async_fn: Any
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Any]
    is_frozen: bool = False


def test_a_request_of_another_library_is_run() -> None:
    log, queue = Log(), AsyncCallsQueue()
    queue.schedule_async_request(OtherRequest(log.append, (1,), [lambda: log.append(2)]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert log == [1, 2]


@pytest.mark.parametrize("persistent", [True, False])
def test_an_aborted_queue_waits_for_nothing_and_finalizes_nothing(persistent) -> None:
    log, go, queue = Log(), threading.Event(), AsyncCallsQueue(persistent=persistent)
    cleaned = threading.Semaphore(0)
    queue.schedule_async_request(log.request("a", go, abort_fn=cleaned.release))
    queue.schedule_async_request(log.request("b", go, abort_fn=cleaned.release))
    queue.close(abort=True)
    assert queue.get_num_unfinalized_calls() == 0
    go.set()
    assert cleaned.acquire(timeout=SECONDS)
    assert cleaned.acquire(timeout=SECONDS)
    assert not [one for one in log if one.endswith("final")]
    assert ("b begins" in log) is not persistent, "a request that waits for its turn is dropped"


@pytest.mark.parametrize("form", [("keepstep", 1), ("torch_dist", 1)])
def test_an_aborted_save_does_not_become_a_checkpoint_and_the_next_one_takes_its_place(tmp_path, form) -> None:
    state = lambda value: {"w": ShardedTensor.from_rank_offsets("w", torch.full((3,), value))}  # noqa: E731
    queue, go, ended = AsyncCallsQueue(persistent=True), threading.Event(), threading.Event()
    queue.schedule_async_request(AsyncRequest(go.wait, (SECONDS,), []))
    request = save(state(1.0), tmp_path, form, async_sharded_save=True)
    abort = request.abort_fn or (lambda: None)
    queue.schedule_async_request(request._replace(abort_fn=lambda: (abort(), ended.set())))
    queue.close(abort=True)
    go.set()
    assert ended.wait(SECONDS)
    assert not check_is_distributed_checkpoint(tmp_path)
    save(state(2.0), tmp_path, form)
    assert load_plain_tensors(tmp_path)["w"].tolist() == [2.0] * 3
