"""Find the newest durable checkpoint of a job at its relays, and that of its final state."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from keepstep.checkpoint.managed.due_checkpoints import Damage, Stored, newest, newest_whole
from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Endpoint
from keepstep.relay_client.relay_link import RelayLink
from keepstep.relay_client.relay_requests import list_checkpoints
from keepstep.state.errors import TransferError
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.threads.starting import ThreadPoolExecutor

LIST_SECONDS = 10.0
"""For one relay to list its checkpoints."""
LIST_THREADS = 32
"""Relays that are asked at once. The other ranks of the group wait for the last answer."""
FIND_PAUSE_SECONDS = 0.5
"""Before relays that did not answer are asked again."""

NO_DAMAGE: Damage = {}

log = get_logger("keepstep.durable")


def stored_at(relay: Endpoint, job: str) -> list[Stored]:
    """Return the committed durable checkpoints of ``job`` at one relay.

    Raises:
        BrokenConnection, TransferError: the relay gave no valid answer.
    """
    deadline = Deadline(LIST_SECONDS, f"{relay.address} did not list its checkpoints")
    link = RelayLink([relay], deadline, patience=LIST_SECONDS, once=True)
    try:
        answer = link.ask(lambda connection: list_checkpoints(connection, job))
        if unreadable := answer.get("unreadable"):
            log.warning("relay cannot read checkpoints; its log says why", relay=relay.address, ids=unreadable)
        return [
            Stored(
                relay=relay.address,
                id=str(view["id"]),
                step=int(view["step"]),
                quorum_id=int(view["quorum_id"]),
                ranks=int(view["ranks"]),
                committed=float(view["committed"]),
                lacking=int(view["lacking"]),
            )
            for view in answer.get("checkpoints") or ()
            if view["kind"] == "durable" and view["committed"] is not None
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"invalid list of checkpoints from {relay.address}: {error!r}") from error
    finally:
        link.close()


def find_newest(
    relays: Callable[[], Sequence[Endpoint]],
    job: str,
    *,
    seconds: float,
    wait: float = 0.0,
    copies: int = 1,
    absent: Callable[[], Collection[str]] = tuple,
    damage: Damage = NO_DAMAGE,
) -> tuple[list[Stored], dict[str, str]]:
    """Return the newest durable checkpoint of ``job``, once for each relay that has it. Empty: no relay has any.

    A relay that does not answer may have a newer one than the others. If as many relays as ``copies`` do not answer,
    this asks them again for a while. With fewer, each checkpoint that has all its copies is at a relay that answers.
    If a newer checkpoint is damaged at the relays that answer, this waits for each relay that does not.

    Args:
        relays: returns all relays that may have one. A relay that it no longer returns counts too.
        job: name of the job.
        seconds: time limit for the relays to answer, if none of those that answer has a checkpoint.
        wait: the same, if one of them has, or if a relay is ``absent``.
        copies: number of relays that store each checkpoint.
        absent: returns the names of relays that have committed the newest checkpoint, and are not registered now.
        damage: copies that could not be loaded.

    Returns:
        The checkpoint, and the sentence about each newer one that is damaged, by its id.

    Raises:
        KeepstepError: no relay is known, or every checkpoint is damaged, or no relay has one and one of them does not
            answer. The job may have a checkpoint then, and must not begin again at step 0.
    """
    began, known, told = time.monotonic(), dict[str, Endpoint](), False
    while True:
        known |= {relay.address: relay for relay in relays()}
        found, silent = _ask(known.values(), job)
        missing = absent()
        silent |= {name: f"relay {name}, which had the newest one, is not registered" for name in missing}
        best, skipped = newest_whole(found, damage)
        waited, enough = time.monotonic() - began, 1 if skipped else copies
        if best and (len(silent) < enough or waited >= wait):
            if silent:
                log.warning(
                    "taking a durable checkpoint although relays that may have a newer one do not answer",
                    step=best[0].step,
                    id=best[0].id,
                    silent_relays=sorted(silent),
                    waited_seconds=round(waited, 1),
                )
            return best, skipped
        if known and not silent:
            if skipped:
                raise KeepstepError(_nothing_whole(job, skipped))
            return [], {}
        if not best and waited >= (max(seconds, wait) if missing else seconds):
            why = "; ".join(silent.values()) or "no relay is registered with the lighthouse"
            if skipped:
                raise KeepstepError(f"{_nothing_whole(job, skipped)}. Other relays do not answer: {why}")
            raise KeepstepError(
                f"cannot find out whether job {job} has a durable checkpoint: {why}; start the relay that stores them "
                f"(keepstep relay), or pass resume=False (KEEPSTEP_RESUME=0) to begin at step 0"
            )
        if silent and not told:
            told = True
            log.warning(
                "waiting for relays that may have a newer durable checkpoint",
                step=best[0].step if best else 0,
                silent_relays=sorted(silent),
                seconds=max(seconds, wait) if missing else wait if best else seconds,
            )
        time.sleep(FIND_PAUSE_SECONDS)  # relays do not announce their start to trainers


def _nothing_whole(job: str, skipped: Mapping[str, str]) -> str:
    return (
        f"job {job} has no durable checkpoint that is whole: {'; '.join(skipped.values())}; bring back a relay that "
        f"has another copy, or pass resume=False (KEEPSTEP_RESUME=0) to begin at step 0"
    )


def find_final(relays: Collection[Endpoint], job: str, step: int, quorum_id: int) -> tuple[list[Stored], list[str]]:
    """Look for the checkpoint of one state of ``job``. Ask each relay once.

    Args:
        relays: that may have it.
        job: name of the job.
        step: number of committed steps.
        quorum_id: of the last of these steps.

    Returns:
        The checkpoint, once for each relay that has it; and why other relays did not answer.
    """
    found, silent = _ask(relays, job)
    return newest(one for one in found if (one.step, one.quorum_id) == (step, quorum_id)), list(silent.values())


def _ask(relays: Collection[Endpoint], job: str) -> tuple[list[Stored], dict[str, str]]:
    """Return what the relays have, and the errors of those that did not answer, by address."""
    found, silent = list[Stored](), dict[str, str]()
    with ThreadPoolExecutor(LIST_THREADS, "keepstep-durable-list") as pool:
        answers = [(relay.address, pool.submit(stored_at, relay, job)) for relay in relays]
    for address, answer in answers:
        try:
            found += answer.result()
        except (BrokenConnection, TransferError) as error:
            silent[address] = str(error)
    return found, silent
