"""Background upload of the live state from the healthy groups to the relays.

``UploadShare`` chooses the chunks of each source. All groups upload a state with the same root digest.

The threads are daemons, so that a script that ends does not wait for them. Python waits for the threads of an executor.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from http import HTTPStatus

from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Endpoint, Refusal
from keepstep.connection.rate_limiter import RateLimiter
from keepstep.relay_client.relay_link import REQUEST_BACKOFF, RelayLink
from keepstep.relay_client.upload_share import UploadShare
from keepstep.relay_client.uploading import Packed, RelayUpload, StatesDiffer
from keepstep.state.errors import TransferError, TransferTimeout
from keepstep.state.staging import Snapshot
from keepstep.transfer.exchange import Exchange
from keepstep.transfer.relayed.live_checkpoint import LiveCheckpoint, home
from keepstep.transfer.state_transfer import STALL_SECONDS
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.threads.starting import Thread

UPLOAD_POLL_SECONDS = 0.1
"""Interval at which a relay is asked which chunks of other groups are missing."""
MAX_FAILURES = 5
"""Failures of a relay in a row, after which another relay gets its chunks."""
MAX_FAILURES_OF_ALL = 9
"""The same if no other relay works: about 7 s, in which a relay may restart."""
END_SECONDS = 10.0
MAX_COPIES = 3
"""A group uploads at most this many times the size of the state, even if relays report more missing chunks."""

log = get_logger("keepstep.transfer")


class Upload:
    """The upload of one snapshot. Call ``start`` once; call ``abort`` from any thread.

    Args:
        snapshot: held by the caller; the upload releases it when it ends.
        exchange: the groups that have, and that need, the state.
        relays: at least one.
        timeout: time limit in seconds.
        limiter: bandwidth limit of the chunks.
    """

    def __init__(
        self, snapshot: Snapshot, exchange: Exchange, relays: list[Endpoint], timeout: float, limiter: RateLimiter
    ) -> None:
        self._snapshot = snapshot
        self._exchange = exchange
        self._deadline = Deadline(timeout, f"step {snapshot.step} was not uploaded")
        self._links = {
            relay.address: RelayLink([relay], self._deadline, patience=STALL_SECONDS, once=True) for relay in relays
        }
        facts = {"step": exchange.step, "kind": "live", "ranks": exchange.world_size, "quorum_id": exchange.quorum_id}
        one = LiveCheckpoint(exchange)
        self._uploads = {
            address: RelayUpload(link, one, facts, limiter=limiter, needs_disk=False)
            for address, link in self._links.items()
        }
        self._failures = dict.fromkeys(self._links, 0)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = Thread(target=self._run, name="keepstep-upload", daemon=True)

    def start(self) -> None:
        """Start the thread of the upload."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the upload has not ended."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end of the upload, at most ``END_SECONDS``."""
        self._thread.join(END_SECONDS)

    def abort(self) -> None:
        """End the upload soon. Does not wait."""
        self._ended.set()
        for link in self._links.values():
            link.interrupt()

    def _run(self) -> None:
        """Upload the state. Never raises: if the upload fails, joiners receive the state from the source."""
        started = time.monotonic()
        try:
            manifest = self._snapshot.manifest.result(self._deadline.remaining())
            self._packed = Packed.of(manifest, self._snapshot.pack)
            self._digests = self._packed.envelope.chunk_digests
            self._upload()
        except (TransferError, TransferTimeout, TimeoutError, KeepstepError) as error:
            if not self._ended.is_set():
                log.warning("live state not uploaded", step=self._snapshot.step, reason=str(error))
        except Exception:
            log.exception("unexpected error in the upload of live state", step=self._snapshot.step)
        else:
            took, aborted = round(time.monotonic() - started, 3), self._ended.is_set()
            what = "upload of live state aborted" if aborted else "live state uploaded"
            log.info(what, step=self._snapshot.step, bytes=self._sent_bytes(), seconds=took)
        finally:
            for link in self._links.values():
                link.close()
            self._snapshot.release()

    def _sent_bytes(self) -> int:
        return sum(one.sent_bytes for one in self._uploads.values())

    def _upload(self) -> None:
        sources, place = len(self._exchange.sources), self._exchange.sources.index(self._exchange.replica_id)
        share = UploadShare(place, sources, len(self._digests))
        while not self._ended.is_set():
            missing = self._announce()
            if not missing and self._finish():
                return
            began = time.monotonic()
            if mine := share.choose(missing, began):
                self._put(mine)
                share.sent(mine, time.monotonic() - began)
            else:
                self._ended.wait(UPLOAD_POLL_SECONDS)

    def _announce(self) -> int:
        """Announce the state to the relays, and return the chunks that are missing at their relay, as bits."""
        found = {}
        for address in self._alive():
            with self._failing(address):
                found[address] = self._uploads[address].announce(self._packed)
        alive = self._alive()
        return sum(
            1 << chunk
            for chunk, digest in enumerate(self._digests)
            if (found.get(where := home(digest, alive)) is None) or found[where] >> chunk & 1
        )

    def _finish(self) -> bool:
        """Report to all relays that the upload is complete. Returns whether all of them confirmed it."""
        confirmed, alive = 0, self._alive()
        for address in alive:
            with self._failing(address):
                try:
                    self._uploads[address].report(part=len(self._links) > 1)
                except Refusal as refusal:
                    if refusal.status != HTTPStatus.INSUFFICIENT_STORAGE:  # else it serves the state from memory
                        raise
                confirmed += 1
        return confirmed == len(alive)

    def _put(self, chunks: int) -> None:
        if self._sent_bytes() > MAX_COPIES * len(self._snapshot.pack):
            raise TransferError(f"chunks are missing at the relays after {MAX_COPIES} uploads of the state")
        alive, by_relay = self._alive(), defaultdict[str, int](int)
        for chunk, digest in enumerate(self._digests):
            if chunks >> chunk & 1:
                by_relay[home(digest, alive)] |= 1 << chunk
        errors: list[BaseException] = []

        def put(address: str, some: int) -> None:
            try:
                with self._failing(address):
                    self._uploads[address].put(self._packed, some)
                    self._failures[address] = 0
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)

        streams = [Thread(target=put, args=one, name="keepstep-upload-stream", daemon=True) for one in by_relay.items()]
        for one in streams:
            one.start()
        for one in streams:
            one.join()
        if errors:
            raise errors[0]

    # ---- relays that fail

    def _alive(self) -> list[str]:
        for most in (MAX_FAILURES, MAX_FAILURES_OF_ALL):
            if alive := [address for address, failures in self._failures.items() if failures < most]:
                return alive
        raise TransferError("every relay failed; joiners receive the state from the source")

    @contextlib.contextmanager
    def _failing(self, address: str) -> Iterator[None]:
        """Count an error of a relay, and pause before the next attempt."""
        sent = self._uploads[address].sent_bytes
        try:
            yield
        except TransferTimeout:
            raise
        except (BrokenConnection, TransferError) as error:
            if self._ended.is_set():
                return
            reason, has_progressed = str(error), self._uploads[address].sent_bytes > sent
            with self._lock:
                failures = 1 if has_progressed else self._failures[address] + 1
                if isinstance(error, StatesDiffer):
                    reason = (
                        f"the states of the groups differ: another group uploads a different state of step "
                        f"{self._snapshot.step}"
                    )
                    failures = MAX_FAILURES_OF_ALL
                self._failures[address] = failures
            log.warning("relay failed an upload", relay=address, failures=failures, reason=reason)
            pause = max(getattr(error, "retry_after", 0.0), REQUEST_BACKOFF.seconds(failures))
            self._ended.wait(min(pause, REQUEST_BACKOFF.most, self._deadline.remaining()))
