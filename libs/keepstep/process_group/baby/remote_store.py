"""The store of the parent process, as the backend of a child process uses it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from keepstep.process_group.group_errors import ProcessGroupError
from keepstep.rendezvous.interruptible_store import InterruptibleStore

CALLS = frozenset({"set", "get", "wait", "check", "add", "compare_set", "delete_key", "num_keys"})
"""Methods of a store that a child process may call."""


class RemoteStore(InterruptibleStore):
    """A store whose calls the parent process carries out, within its own deadlines.

    Args:
        send: sends a request to the parent.
        host: name or address of the store's host.
        version: lowest version of the rendezvous that all members support.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None], host: str, version: int) -> None:
        super().__init__()
        self._send = send
        self.host = host
        self.version = version
        self.answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """Answers of the parent, in the order of the requests."""

    def abort(self, reason: str) -> None:
        """Make a call in progress raise ``ProcessGroupError(reason)``."""
        self.answers.put({"error": reason})

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._call("get", key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._call("wait", list(keys), *([] if timeout is None else [timeout.total_seconds()]))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._call("compare_set", key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete_key", key))

    def num_keys(self) -> int:
        return int(self._call("num_keys"))

    def _call(self, method: str, *args: Any) -> Any:
        self._send({"do": "store", "method": method, "args": list(args)})
        answer = (
            self.answers.get()
        )  # the parent always answers: its store has a deadline, and its end ends this process
        if "error" in answer:
            raise ProcessGroupError(answer["error"])
        return answer["value"]


def call_store(store: Store, method: str, args: list[Any]) -> dict[str, Any]:
    """Run a request of a child process on ``store``; return the answer."""
    if method not in CALLS:
        return {"error": f"invalid store method {method!r}"}
    if method == "wait" and len(args) > 1:
        args = [args[0], timedelta(seconds=args[1])]
    try:
        value = getattr(store, method)(*args)
    except Exception as error:  # noqa: BLE001  the child gets it
        return {"error": f"{type(error).__name__}: {error}"}
    return {"value": value}
