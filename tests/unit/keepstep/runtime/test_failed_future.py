"""A torch future that fails: what its readers get, and what it keeps alive."""

from __future__ import annotations

import gc
import weakref
from typing import Self

import pytest
from torch.futures import Future

from keepstep.runtime.failed_future import fail_future
from keepstep_mesh.errors import LayoutMismatch


def test_each_reader_gets_a_copy_with_the_arguments_and_attributes() -> None:
    future: Future[None] = Future()
    fail_future(future, LayoutMismatch("layouts differ", "http://10.0.0.1:1"))
    caught = []
    for read in (future.wait, future.value):
        with pytest.raises(LayoutMismatch, match="layouts differ") as info:
            read()
        caught.append(info.value)
    assert caught[0] is not caught[1]
    assert caught[0].peer_address == caught[1].peer_address == "http://10.0.0.1:1"


class NeedsTwoArguments(Exception):
    def __new__(cls, code: int, reason: str) -> Self:
        return super().__new__(cls, code, reason)

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


@pytest.mark.parametrize(
    "error",
    [
        NeedsTwoArguments(3, "bad value"),
        FileNotFoundError(2, "No such file or directory", "/data/shard-7"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ],
)
def test_an_error_that_cannot_be_copied_completes_the_future_with_its_own_text(error: Exception) -> None:
    future: Future[None] = Future()
    fail_future(future, error)
    with pytest.raises(type(error)) as info:
        future.value()
    assert str(info.value) == str(error)


def test_a_callback_sees_the_error() -> None:
    future: Future[None] = Future()
    after = future.then(lambda done: done.value())
    fail_future(future, TimeoutError("too late"))
    with pytest.raises(Exception, match="too late"):
        after.wait()


def test_the_frames_of_a_reader_are_freed_though_the_future_lives() -> None:
    class Held:
        future: Future[None] = Future()

    def read(held: Held) -> None:
        with pytest.raises(OSError, match="gone"):
            held.future.value()

    held = Held()
    held.future = Future()
    fail_future(held.future, OSError(5, "gone"))
    freed = weakref.ref(held)
    read(held)
    del held
    gc.collect()
    assert freed() is None
