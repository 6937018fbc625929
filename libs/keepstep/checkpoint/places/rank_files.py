"""The small files with which the ranks of one save to a directory find each other, in its folder ``.saving``.

* ``layout-N``: what rank N holds, after 16 random bytes that name its process and 8 bytes of its step.
* ``seen-N``: digest of all layouts as rank N read them. Files of an earlier attempt may be there; when the ``seen`` of
  all ranks are equal, all have read the layouts of this attempt, because each of them has its own random bytes. The
  digest names the attempt from then on.
* ``failed-N``: the error of rank N before that.
* ``result-N``: JSON with the attempt, and the root of the manifest, or the error of rank N after its ``seen``. Rank 0
  reads all of them, and commits, or writes ``aborted`` with the reason.
* ``noted-N``: the attempt, whose commit rank N has seen. Rank 0 removes the folder when all are there; then all ranks
  return, and the directory may be renamed, or saved to again.
* ``conflict``: two processes save as the same rank. Rank 0 does not commit then.

They are not synced to disk: the save ends with its processes.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from keepstep.checkpoint.places.durable_files import create_whole, make_folder, write_whole
from keepstep.checkpoint.places.target import Exchanged, SaveFacts
from keepstep.connection.deadline import Deadline
from keepstep.state.errors import CheckpointAborted, CheckpointDamaged, CheckpointError
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.protocol.manifest import chunk_digest

_NONCE_BYTES = 16
_STEP_BYTES = 8
_POLL_FIRST_SECONDS = 0.001
_POLL_MOST_SECONDS = 0.25
_POLL_SECONDS_PER_RANK = 0.01
"""Of one process at least: many ranks together look less often."""
END_SECONDS = 10.0
"""Longest wait after a commit for ranks that may have been lost since."""
STALE_SECONDS = 5.0
"""After this time in the exchange, an error of another rank counts that was there when this rank began: its rank, which
deletes it when it begins, has failed in this attempt."""
OLD_SECONDS = 60.0
"""An error that was there when this rank began, and is older than this, is of an earlier attempt."""

log = get_logger("keepstep.checkpoint")


class RankFiles:
    """The files of one rank.

    Args:
        place: the directory of the checkpoint.
        facts: the save.
        deadline: of the save.
        look: called while this rank waits; raises if another save has committed a checkpoint to the directory.
    """

    def __init__(self, place: Path, facts: SaveFacts, deadline: Deadline, look: Callable[[], None]) -> None:
        self.folder = place / ".saving"
        self._place = place
        self._facts = facts
        self._deadline = deadline
        self._look = look
        self._poll = Backoff(
            _POLL_FIRST_SECONDS, min(_POLL_MOST_SECONDS, _POLL_SECONDS_PER_RANK * (facts.world_size + 1))
        )
        self._layout = b""
        """File of this rank, as it was written."""
        self._agreed: list[bytes] = []
        """Files of all ranks, after the exchange."""
        self._at_begin: dict[int, tuple[int, int]] = {}
        """Identities of the errors that were there when this rank began."""
        self._tells = True
        """Whether an error of this rank before the end of the exchange is news to the other ranks."""
        self._seen = b""
        """Digest in the ``seen-N`` of this rank; empty: it has written none."""
        self.attempt = ""
        """Equal at all ranks after the exchange. Empty before."""
        self.may_be_committed = False
        """Whether rank 0 may commit the part of this rank, which has reported it."""

    def begin(self) -> list[Path]:
        """Delete the files that this rank left in an earlier attempt. Return the folders that are new."""
        new = make_folder(self.folder)
        if self._facts.rank == 0:
            # Before the layout: another process that saves as this rank writes the conflict when its layout is gone.
            (self.folder / "conflict").unlink(missing_ok=True)
        for name in ("failed", "layout"):
            self._file(name).unlink(missing_ok=True)
        self._at_begin = {rank: found for rank in self._ranks if (found := identity(self._file("failed", rank)))}
        return new

    @property
    def _ranks(self) -> range:
        return range(self._facts.world_size)

    def _file(self, name: str, rank: int | None = None) -> Path:
        return self.folder / f"{name}-{self._facts.rank if rank is None else rank}"

    # ---- before the bytes are stored

    def exchange(self, layout: bytes) -> Exchanged:
        """See ``CheckpointTarget``."""
        head = secrets.token_bytes(_NONCE_BYTES) + self._facts.step.to_bytes(_STEP_BYTES, "big")
        self._layout = head + layout
        with self._not_removed():
            if not create_whole(self._file("layout"), self._layout, sync=False):
                self._conflict()
        began = time.monotonic()

        def agreed() -> list[bytes] | None:
            self._check_failed(time.monotonic() - began)
            layouts = [read(self._file("layout", rank)) for rank in self._ranks]
            if layouts[self._facts.rank] != self._layout:
                self._conflict()
            found = [one for one in layouts if one is not None]
            if len(found) < len(layouts):
                return None
            digest = chunk_digest(b"".join(chunk_digest(one) for one in found))
            if digest != self._seen:
                self._seen = digest
                write_whole(self._file("seen"), digest, sync=False)
            return found if all(read(self._file("seen", rank)) == digest for rank in self._ranks) else None

        self._agreed = self._wait(agreed, lambda: f"layouts of ranks {self._absent('seen', self._seen)}")
        self.attempt = self._seen.hex()
        self._check_steps()
        layouts = [one[_NONCE_BYTES + _STEP_BYTES :] for one in self._agreed]
        different = {one: number for number, one in enumerate(dict.fromkeys(layouts))}
        return Exchanged(tuple(different), tuple(different[one] for one in layouts))

    def _conflict(self) -> NoReturn:
        """Raise, and keep rank 0 from a commit: each of the two processes may have met ranks of the other save."""
        self._tells = False  # the files of this rank are those of the other process
        rank = self._facts.rank
        message = f"another process saves to {self._place} as rank {rank}: save to a directory of its own"
        write_whole(self.folder / "conflict", message.encode(), sync=False)
        raise CheckpointError(message)

    def _check_failed(self, waited: float) -> None:
        for rank in self._ranks:
            found = identity(path := self._file("failed", rank))
            if found is None or (found == self._at_begin.get(rank) and not self._is_of_this_attempt(found, waited)):
                continue
            error = (read(path) or b"").decode()
            self._tells = False
            raise CheckpointAborted(f"the save to {self._place} was aborted: rank {rank} failed: {error}")

    def _is_of_this_attempt(self, failed: tuple[int, int], waited: float) -> bool:
        """Return whether an error was written by a rank that began before this one, and not in an earlier attempt."""
        own = identity(self._file("layout"))  # the clock of the file system counts, not that of this host
        return waited > STALE_SECONDS and own is not None and own[1] - failed[1] < OLD_SECONDS * 1e9

    def _check_steps(self) -> None:
        """Raise if the ranks save different steps: one of them is of another save, or has fallen behind."""
        steps = [int.from_bytes(one[_NONCE_BYTES:][:_STEP_BYTES], "big") for one in self._agreed]
        for rank, step in enumerate(steps):
            if step != steps[0]:
                raise CheckpointError(
                    f"the ranks that save to {self._place} are at different steps: rank 0 at {steps[0]}, rank {rank} "
                    f"at {step}: save each step to a directory of its own"
                )

    def _absent(self, name: str, content: bytes) -> str:
        absent = [rank for rank in self._ranks if read(self._file(name, rank)) != content]
        return ", ".join(map(str, absent[:10]))

    # ---- after the bytes are stored

    def report(self, root: str) -> None:
        """Report that this rank has stored its part, whose manifest has the root digest ``root``."""
        self.may_be_committed = True
        with self._not_removed():
            write_json(self._file("result"), {"attempt": self.attempt, "root": root})

    def roots(self) -> list[str]:
        """Wait until all ranks have reported, and return their root digests. For rank 0.

        Raises:
            CheckpointAborted: a rank failed, or did not report in time.
            CheckpointError: another process saves as one of the ranks.
        """

        def results() -> list[dict[str, Any]] | None:
            found = [read_json(self._file("result", rank)) for rank in self._ranks]
            for rank, one in enumerate(found):
                if one.get("attempt") == self.attempt and "error" in one:
                    raise CheckpointAborted(
                        f"the save to {self._place} was aborted: rank {rank} failed: {one['error']}"
                    )
            return found if all(one.get("attempt") == self.attempt for one in found) else None

        def absent() -> str:
            late = (
                rank for rank in self._ranks if read_json(self._file("result", rank)).get("attempt") != self.attempt
            )
            return "results of ranks " + ", ".join(map(str, late))

        roots = [str(one["root"]) for one in self._wait(results, absent)]
        conflict = read(self.folder / "conflict")
        if conflict is not None or [read(self._file("layout", rank)) for rank in self._ranks] != self._agreed:
            why = (conflict or b"another process has begun to save there").decode()
            raise CheckpointError(f"{self._place} was not saved, because two saves have met there: {why}")
        return roots

    def wait_for_commit(self, is_committed: Callable[[], bool]) -> None:
        """Wait until rank 0 has committed, and has seen that all ranks know. Raises ``CheckpointAborted``."""

        def ended() -> bool | None:
            if is_committed():
                return True
            if not self.folder.exists() and not is_committed():  # rank 0 waited in vain for this rank
                self._look()
                raise CheckpointError(
                    f"{self._place} was renamed or deleted before rank {self._facts.rank} saw a commit"
                )
            aborted = read_json(self.folder / "aborted")
            if aborted.get("attempt") == self.attempt:
                self.may_be_committed = False
                raise CheckpointAborted(str(aborted.get("error")))
            return None

        self._wait(ended, lambda: "the commit of rank 0")
        with contextlib.suppress(FileNotFoundError):  # renamed already
            write_whole(self._file("noted"), self.attempt.encode(), sync=False)
        self._wait_at_end(lambda: not self.folder.exists(), "rank 0 has not ended the save")

    def wait_for_others(self) -> None:
        """Wait until all ranks have seen the commit, but not for long. For rank 0."""
        others, attempt = self._ranks[1:], self.attempt.encode()
        self._wait_at_end(
            lambda: all(read(self._file("noted", rank)) == attempt for rank in others),
            "a rank has not seen the commit",
        )

    def _wait_at_end(self, look: Callable[[], bool], what: str) -> None:
        """Wait for an event after the commit. A rank that is lost now does not take the checkpoint back."""
        end, attempts = time.monotonic() + END_SECONDS, 0
        while not look():
            if time.monotonic() > end:
                log.warning("a committed save ends without all ranks", place=str(self._place), reason=what)
                return
            attempts += 1
            time.sleep(self._poll.seconds(attempts))  # a shared file system announces nothing

    def fail(self, error: str) -> None:
        """Tell the other ranks why this one failed. Never raises."""
        try:
            if not self.attempt and self._tells:
                write_whole(self._file("failed"), error.encode(errors="backslashreplace"), sync=False)
            is_first = self._facts.rank == 0  # the others wait for its word, also on the failure of another rank
            if attempt := self.attempt or (self._seen.hex() if self._tells or is_first else ""):
                name = "aborted" if is_first else self._file("result").name
                write_json(self.folder / name, {"attempt": attempt, "error": error})
        except OSError as problem:
            log.warning("the failure did not reach the other ranks", reason=str(problem))

    def _wait(self, look: Callable[[], Any], missing: Callable[[], str]) -> Any:
        attempts = 0
        with self._not_removed():
            while (found := look()) is None:
                self._look()
                attempts += 1
                try:
                    left = self._deadline.remaining()
                except TimeoutError as error:
                    raise CheckpointAborted(f"{error}; missing in {self._place}: {missing()}") from error
                time.sleep(min(self._poll.seconds(attempts), left))  # a shared file system announces nothing
        return found

    @contextlib.contextmanager
    def _not_removed(self) -> Iterator[None]:
        """Explain that the folder is gone: another save has committed its checkpoint, and removed it."""
        try:
            yield
        except FileNotFoundError:
            self._look()
            raise


def identity(path: Path) -> tuple[int, int] | None:
    """Return the number of a file, and its time in nanoseconds. A file that is written again has other ones."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def read(path: Path) -> bytes | None:
    """Return the content of a file. None: it does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty: the file is absent."""
    data = read(path)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except ValueError as error:
        raise CheckpointDamaged(f"{path} is damaged: {error}") from error
    if type(value) is not dict:
        raise CheckpointDamaged(f"{path} is damaged: it is not a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object to a file, whole or not at all."""
    write_whole(path, json.dumps(value, indent=1).encode(), sync=False)
