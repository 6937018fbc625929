"""A process that runs services on one event loop until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.faults import accepting_faults
from keepstep_mesh.net.event_loop import new_event_loop
from keepstep_mesh.security.reloaded_files import ReloadedFiles
from keepstep_mesh.serving.listen_settings import ListenSettings
from keepstep_mesh.serving.service import STOP_SECONDS, Endpoint, Service, serving_with

log = get_logger("keepstep.service")

END_SECONDS = 10.0
"""From the deadlines of all graceful stops to the end of the process by SIGALRM."""


@dataclass(frozen=True)
class Hosted:
    """One service of a process."""

    service: Callable[[], Service]
    """Creates the service; called on the event loop."""
    settings: ListenSettings
    started: Callable[[Endpoint], None]
    """Called once with the address on which the service listens."""


def run_services(hosted: Sequence[Hosted], *, uvloop: bool = True) -> None:
    """Run services until SIGTERM or SIGINT, then stop them gracefully. A second signal ends the process at once.

    A process that cannot stop ends by SIGALRM, ``END_SECONDS`` after the deadlines of its services: for example, its
    stop waits for a thread that had no memory left for its start. The caller must end the process by then too.

    Each service starts when the one before listens; the last one stops first. SIGHUP reloads the files of tokens and
    certificates; in a process without such files it keeps its default action, which ends the process.

    Args:
        hosted: the services, in the order in which they start.
        uvloop: use uvloop if it is installed.

    Raises:
        KeepstepError: a service cannot start: its port is in use, or its tokens or certificates are invalid.
    """
    reload_events: list[asyncio.Event] = []

    def reload_all() -> None:
        for event in reload_events:
            event.set()

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for one in hosted:
                reload_files = asyncio.Event()
                if _has_files(one.settings):
                    reload_events.append(reload_files)
                    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload_all)
                endpoint = await stack.enter_async_context(serving_with(one.service(), one.settings, reload_files))
                if one is not hosted[-1]:
                    one.started(endpoint)
            gc.collect()
            gc.freeze()  # modules and routes stay: a collection that visits them too stops the event loop for longer
            with _watched_signals() as received:  # before the last one is called started: who sees that may signal it
                one.started(endpoint)
                number = await received
            log.info("stopping", signal=number.name)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # by the kernel: no thread of this process may be able to
            signal.alarm(math.ceil(END_SECONDS + STOP_SECONDS * len(hosted)))

    _raise_descriptor_limit()
    with accepting_faults(), asyncio.Runner(loop_factory=new_event_loop if uvloop else None) as runner:
        runner.run(main())


def _has_files(settings: ListenSettings) -> bool:
    return bool(settings.tls) or (isinstance(settings.tokens, ReloadedFiles) and bool(settings.tokens.files))


@contextlib.contextmanager
def _watched_signals() -> Iterator[asyncio.Future[signal.Signals]]:
    """Yield a future that gets SIGTERM or SIGINT; at the end, restore their default action."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if not received.done():
            received.set_result(number)

    watched = (signal.SIGTERM, signal.SIGINT)
    for one in watched:
        loop.add_signal_handler(one, on_signal, one)
    try:
        yield received
    finally:
        for one in watched:
            loop.remove_signal_handler(one)


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard one: each connection needs one, and the usual limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
