"""The child process of a process group: runs collectives for its parent, until the connection ends."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from keepstep.process_group.baby.channel import Channel, ChannelError
from keepstep.process_group.baby.operations import UnpackedCall
from keepstep.process_group.baby.remote_store import RemoteStore
from keepstep.process_group.baby.shared_memory import Segment
from keepstep.process_group.base import ProcessGroup
from keepstep.process_group.torch_backends.gloo import ProcessGroupGloo
from keepstep.process_group.torch_backends.nccl import ProcessGroupNCCL, ProcessGroupXCCL
from keepstep.runtime.devices import begin_gpu_thread
from keepstep_mesh.threads.starting import Thread

BACKENDS: dict[str, Callable[[timedelta], ProcessGroup]] = {
    "gloo": ProcessGroupGloo,
    "nccl": ProcessGroupNCCL,
    "xccl": ProcessGroupXCCL,
}


class Child:
    """Runs the orders of the parent in their order.

    Args:
        channel: connection with the parent.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._orders: queue.SimpleQueue[tuple[dict[str, Any], list[int]]] = queue.SimpleQueue()
        self._segments: dict[int, Segment] = {}
        self._group: ProcessGroup | None = None
        self._store: RemoteStore | None = None
        self._device: int | None = None
        """Index of the accelerator that the group uses."""

    def run(self) -> None:
        """Follow the orders. Does not return: the end of the connection ends the process."""
        Thread(target=self._receive, name="keepstep-orders", daemon=True).start()
        while True:
            order, descriptors = self._orders.get()
            try:
                getattr(self, f"_{order['do']}")(order, descriptors)
            except Exception as error:  # noqa: BLE001  the parent gets it
                self._answer(order, error)

    def _receive(self) -> None:
        try:
            while (received := self._channel.receive()) is not None:
                message, descriptors = received
                if message["do"] == "answer" and self._store is not None:
                    self._store.answers.put(message)
                else:
                    self._orders.put((message, descriptors))
        except (ChannelError, OSError):
            pass  # the parent kills a child that it cannot understand
        finally:
            os._exit(0)

    def _answer(self, order: dict[str, Any], error: BaseException | None) -> None:
        try:
            failed = self._group is not None and self._group.errored() is not None
            kind, text = (None, None) if error is None else (type(error).__name__, str(error))
            self._channel.send({"do": "done", "id": order["id"], "kind": kind, "error": text, "failed": failed})
        except BaseException:  # noqa: BLE001  the parent has ended, or would wait in vain
            os._exit(0)

    def _configure(self, order: dict[str, Any], _: list[int]) -> None:
        self._device = None if order["backend"] == "gloo" else order["device"]
        begin_gpu_thread(self._device)
        self._store = RemoteStore(self._channel.send, order["store_host"], order["store_version"])
        self._group = BACKENDS[order["backend"]](timedelta(seconds=order["timeout"]))
        self._group.configure("", *order["args"], store=self._store, host=order["host"])
        self._answer(order, None)

    def _set_timeout(self, order: dict[str, Any], _: list[int]) -> None:
        self._configured().set_timeout(timedelta(seconds=order["timeout"]))

    def _map(self, order: dict[str, Any], descriptors: list[int]) -> None:
        (descriptor,) = descriptors
        self._segments[order["segment"]] = Segment(descriptor, order["size"])
        os.close(descriptor)

    def _unmap(self, order: dict[str, Any], _: list[int]) -> None:
        self._segments.pop(order["segment"], None)

    def _run(self, order: dict[str, Any], _: list[int]) -> None:
        group = self._configured()
        number = order["segment"]
        call = UnpackedCall(order, None if number is None else self._segments[number])
        work = group._run(call.operation, *call.args)  # noqa: SLF001  both classes are of this package
        if self._device is not None:
            Thread(target=self._wait_for_device, args=(order, call, work), daemon=True).start()
        else:
            work.get_future().add_done_callback(lambda future: self._finished(order, call, future.value))

    def _wait_for_device(self, order: dict[str, Any], call: UnpackedCall, work: Work) -> None:
        """Answer when the device has finished, so that the parent needs no stream of this process."""

        def finish() -> None:
            begin_gpu_thread(self._device)  # else `errored` waits for device 0, and returns before the result is there
            work.wait()
            failure = self._configured().errored()  # waits for the stream
            if failure is not None:
                raise failure

        self._finished(order, call, finish)

    def _finished(self, order: dict[str, Any], call: UnpackedCall, outcome: Callable[[], Any] | Future[Any]) -> None:
        error: BaseException | None = None
        try:
            outcome()  # type: ignore[operator]
            call.copy_results()
        except Exception as raised:  # noqa: BLE001  the parent gets it
            error = raised
        self._answer(order, error)

    def _configured(self) -> ProcessGroup:
        if self._group is None:
            raise ChannelError("the process group of this child is not configured")
        return self._group
