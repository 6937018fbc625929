"""Durable checkpoints of one Manager: when they are written, and what a job without a live state resumes from.

The state of step n is complete when the script has stepped its optimizer, so it is staged when step n + 1 begins. All
groups stage it, and upload a share each. A group that begins at step 0 loads the newest checkpoint, unless another
group has a live state from which it heals. All groups of a job thus load the same one; if they do not, those that are
behind heal from the others.

With ``finish(publish=True)`` the groups write one of the final state too. A group that comes after the end loads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistStoreError, Store

from keepstep.checkpoint.places.location import AtRelay
from keepstep.checkpointing.direct.http_connection import Endpoint
from keepstep.checkpointing.direct.rate_limiter import RateLimiter
from keepstep.checkpointing.durable.due_checkpoints import (
    MAX_UPLOADERS,
    Commit,
    Stored,
    choose_relays,
    follow_seconds,
    is_due,
)
from keepstep.checkpointing.durable.durable_upload import COMMIT_SECONDS, Ticket
from keepstep.checkpointing.durable.durable_writer import DurableWriter, LastCheckpoint
from keepstep.checkpointing.durable.newest_checkpoint import LIST_SECONDS, find_final, find_newest
from keepstep.checkpointing.durable.rank_loading import load_rank
from keepstep.checkpointing.relayed.relay_client import Credentials, RelayCheckpoint
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.lifecycle.manager_settings import ManagerSettings
from keepstep.lifecycle.resharding import load_resharded
from keepstep.runtime.exits import JobClosedExit, script_error
from keepstep.step.context import StepContext
from keepstep_mesh.errors import Drained, JobClosed, KeepstepError
from keepstep_mesh.protocol.lineage import NEW, Soundness, origin, same_weights, soundness
from keepstep_mesh.security.tls import TlsFiles, as_safe
from keepstep_mesh.security.tokens import ClientToken

Choice = dict[str, Any]
"""The checkpoint to load; empty: none. Plain values, for the other ranks."""
RANK_0_ROUNDS = 10
"""Waits of a rank for rank 0 of its group, which may prepare its data before its first step."""


class Durability:
    """The durable checkpoints of one rank.

    Args:
        settings: of the Manager.
        context: of its steps.
    """

    def __init__(self, settings: ManagerSettings, context: StepContext) -> None:
        own = settings.link
        self._settings = settings.durable
        self._connect_seconds = own.session.connect_timeout
        self._context = context
        self._credentials = Credentials(ClientToken.of(own.token), own.session.tls or TlsFiles())
        self._seconds = settings.timeout.total_seconds()
        self._writer = DurableWriter(
            seconds=self._seconds,
            newest_wins=self._settings.newest_wins,
            limiter=RateLimiter(settings.uplink),
            report=self._report,
        )
        self._commit: tuple[QuorumPlan, int] | None = None
        """The last committed step: its plan, and the number of committed steps after it."""
        self._attempts = 0
        """Number of checkpoints of that step."""
        self._saved = 0
        self._looked = False
        self._rounds = 0
        """Number of values that the ranks of this group agreed on."""
        context.find_final = self.find_final

    @property
    def last(self) -> LastCheckpoint:
        """Knowledge of this rank about the checkpoints of its job."""
        return self._writer.last

    def _report(self, step: int, nbytes: int, seconds: float, error: str) -> None:
        self._context.telemetry.durable(step, self._settings.every, nbytes, seconds, error)
        if not error:
            self._tell_lighthouse()

    def _tell_lighthouse(self) -> None:
        """Let the lighthouse know which relays have the newest checkpoint, for the next life of the job."""
        if not self._settings.relays and self._context.settings.rank == 0:
            names = (name for name, address in self._registered().items() if address in self.last.relays)
            self._context.link.stored_at(tuple(sorted(names)))

    # ---- writing

    def committed(self, plan: QuorumPlan) -> None:
        """Note that the step of ``plan`` was committed."""
        self._commit, self._attempts = (plan, self._context.progress.step), 0

    def before_step(self) -> None:
        """Resume in front of the first step; stage the state of the last one, if a checkpoint of it is due."""
        if self._settings.resumes:
            self.resume()
        self._save_if_due()

    def _save_if_due(self) -> None:
        step = self._context.progress.step
        if is_due(step, self._settings.every, self._saved) and self._commit is not None and self._commit[1] == step:
            self._save(*self._commit)

    def save(self) -> LastCheckpoint:
        """Stage the state now. RuntimeError if it is not that of a step that this process committed."""
        step = self._context.progress.step
        if self._commit is None or self._commit[1] != step:
            raise RuntimeError(
                f"no step has been committed since this process started or healed (step {step}); call "
                f"save_checkpoint() after a step that committed, and before the next one begins"
            )
        before = self.last
        self._save(*self._commit)
        return before

    def publish(self, seconds: float | None) -> bool:
        """Write the state of the last step, if this process committed it, and wait until a relay has it.

        Args:
            seconds: limit of the wait; None: that of an upload.

        Returns:
            Whether nothing is left to write.
        """
        if self._commit is None or self._commit[1] != self._context.progress.step:
            return True
        if self._saved != self._commit[1]:
            self._save(*self._commit)
        limit = COMMIT_SECONDS if seconds is None else seconds
        written = self._writer.finish(limit)
        if not written:
            self._context.log.error("final state not published yet", step=self._commit[1], waited_seconds=limit)
        return written

    def _save(self, plan: QuorumPlan, step: int) -> None:
        context, writer = self._context, self._writer
        self._saved = step
        self._attempts += 1
        relays = self._relays()
        ticket = self._ticket(plan, step, spare_relays=len(relays) > self._settings.copies)
        chosen = choose_relays(writer.usable(relays), context.settings.job, self._settings.copies)
        endpoints = [relays[address] for address in chosen]
        try:
            # in every rank, also if it does not upload: FSDP's state_dict is collective
            state = context.state.snapshot()
        except Exception as error:  # noqa: BLE001  a checkpoint that fails does not stop training
            writer.refuse(ticket, endpoints, f"{type(error).__name__}: {error}")
            return
        if not endpoints:
            writer.failed(step, "no relay is registered with the lighthouse; start one (keepstep relay)")
            return
        try:
            writer.offer(ticket, endpoints, state)
        except TimeoutError as error:
            writer.failed(step, str(error))
        except Exception as error:  # noqa: BLE001  as above
            writer.refuse(ticket, endpoints, f"{type(error).__name__}: {error}")

    def _ticket(self, plan: QuorumPlan, step: int, *, spare_relays: bool) -> Ticket:
        context, own = self._context, self._context.settings
        commit = Commit(plan.epoch, plan.quorum_id, step, plan.replica_ids)
        # groups whose states differ by design do not share an upload
        shared = context.state.compared is None
        uploaders = commit.uploaders(self._settings.every, MAX_UPLOADERS if shared else 1)
        producer, progress = context.link.replica_id, context.progress
        if producer in uploaders and soundness(progress.step, progress.lineage) is not Soundness.SOUND:
            uploaders = tuple(one for one in uploaders if one != producer)
        return Ticket(
            job=own.job,
            checkpoint=RelayCheckpoint(own.job, commit.checkpoint_id(self._attempts), own.rank, producer),
            step=step,
            facts={
                "step": step,
                "kind": "durable",
                "ranks": own.world_size,
                "quorum_id": plan.quorum_id,
                "one_producer": own.world_size > 1,
            },
            uploaders=uploaders,
            producer=producer,
            follow_seconds=follow_seconds(len(commit.members) * own.world_size),
            spare_relays=spare_relays,
        )

    def _relays(self) -> dict[str, Endpoint]:
        """Return the relays that may store checkpoints, by address."""
        addresses = self._settings.relays or self._registered().values()
        return {address: self._credentials.endpoint(address) for address in addresses}

    def _registered(self) -> dict[str, str]:
        """Return the addresses of the relays that are registered with the lighthouse, by name."""
        context = self._context
        lighthouse = context.settings.session.addresses[0]
        return {one.name: as_safe(one.address, lighthouse) for one in context.link.services if one.service == "relay"}

    def _absent(self) -> tuple[str, ...]:
        """Return the relays that committed the newest checkpoint, and are not registered."""
        if self._settings.relays:
            return ()
        registered = self._registered()
        return tuple(name for name in self._context.link.durable_relays if name not in registered)

    # ---- resuming

    def resume(self) -> bool:
        """Load the newest checkpoint of the job, if this group has no state yet. Return whether it did.

        Raises:
            KeepstepError: the relays did not answer, or the checkpoint could not be loaded.
        """
        context = self._context
        if self._looked or self._settings.resume is False:
            return False
        self._looked = True
        if context.progress.step or not self._is_new():
            return False  # the script has loaded a checkpoint of its own
        choice = self._agree(self._choose_unless_live)
        if choice.get("live") or context.stands_by:  # groups with a live state may be gone when a spare gets its place
            context.resume = self._resume_in_quorum
        return self._load(choice) if "live" not in choice else False

    def _is_new(self) -> bool:
        lineage = self._context.progress.lineage
        return lineage == "" or (isinstance(lineage, str) and lineage.startswith(NEW))

    def _choose_unless_live(self) -> Choice:
        """Return {"live": step} if another group has a live state: this group heals from it."""
        if live_step := self._context.link.live_step:
            return {"live": live_step}
        return self._choose()

    def _resume_in_quorum(self, plan: QuorumPlan | None) -> bool:
        """Load the newest checkpoint, if it is newer than the states of a quorum that has no live one.

        ``plan``: None: no quorum formed, because the job does not begin at the state of this group.
        """
        choice = self._agree(self._choose)
        known = (0, 0) if plan is None else (origin(plan.lineage).quorum_id, plan.max_step)  # as in ``newest``
        return self._load(choice) if choice and (choice["quorum_id"], choice["step"]) > known else False

    def _choose(self) -> Choice:
        job = self._context.settings.job
        settings = self._settings
        found = find_newest(
            lambda: list(self._relays().values()),
            job,
            seconds=self._connect_seconds,
            wait=settings.resume_wait,
            copies=settings.copies,
            absent=self._absent,
        )
        return self._choice(found) if found else {}

    @staticmethod
    def _choice(found: list[Stored]) -> Choice:
        one, relays = found[0], sorted(each.relay for each in found)
        facts = {"step": one.step, "quorum_id": one.quorum_id, "ranks": one.ranks, "committed": one.committed}
        return {"id": one.id, "relays": relays, **facts}

    def find_final(self, closed: JobClosed) -> None:
        """Find the final state of a closed job at a relay. The attempt then loads it. In all ranks of the group.

        Raises:
            JobClosedExit: no relay has it, or this group has it and wants to train on.
        """
        context = self._context
        if context.progress.step == closed.step and same_weights(context.progress.lineage, closed.lineage):
            context.end_with(JobClosedExit(str(closed)))
        choice = self._agree(lambda: self._choose_final(closed))
        if why_not := choice.get("why_not"):
            context.end_with(JobClosedExit(f"{closed}; the final state was not loaded: {why_not}"))
        context.load_final = partial(self._load_final, choice, closed)

    def _load_final(self, choice: Choice, closed: JobClosed) -> None:
        progress = self._context.progress
        try:
            self._load(choice)
            if progress.step != closed.step or not same_weights(progress.lineage, closed.lineage):
                raise KeepstepError(f"checkpoint {choice['id']} has another one, of step {progress.step}")
        except Exception as error:  # noqa: BLE001  whatever it is, the group came too late
            self._context.end_with(JobClosedExit(f"{closed}; the final state was not loaded: {error}"))

    def _choose_final(self, closed: JobClosed) -> Choice:
        if self._settings.resume is False:
            return {"why_not": "resume=False (KEEPSTEP_RESUME=0)"}
        where = list(self._relays().values())
        found, silent = find_final(where, self._context.settings.job, closed.step, origin(closed.lineage).quorum_id)
        if found:
            return self._choice(found)
        why_not = "no relay has it; finish(publish=True) in all groups stores it there"
        return {"why_not": "; ".join((why_not, *silent))}

    def _agree(self, choose: Callable[[], Choice]) -> Choice:
        """Return the choice of rank 0 in every rank of this group."""
        own, store = self._context.settings, self._context.store
        if store is None:
            return choose()
        key = f"keepstep/{own.restart}/resume/{self._rounds}"
        self._rounds += 1
        if own.rank == 0:
            try:
                choice = choose()
            except Exception as error:
                store.set(key, json.dumps({"error": str(error)}))
                raise
            store.set(key, json.dumps(choice))
            return choice
        seconds = max(self._connect_seconds, self._settings.resume_wait) + 2 * LIST_SECONDS
        answer: Choice = json.loads(value_of_rank_0(store, key, seconds, self._still_waiting))
        if "error" in answer:
            raise KeepstepError(f"rank 0: {answer['error']}")
        return answer

    def _still_waiting(self) -> None:
        self._context.raise_fatal()
        self._context.log.warning("rank 0 has not chosen a durable checkpoint yet: it is not at its first step")

    def _load(self, choice: Choice) -> bool:
        context, own = self._context, self._context.settings
        if not choice:
            context.log.info("no durable checkpoint; the job begins at step 0")
            return False
        name, ranks, addresses = str(choice["id"]), int(choice["ranks"]), tuple(choice["relays"])
        relays = [self._credentials.endpoint(address) for address in addresses]
        try:
            into = context.state.snapshot()
            if ranks == own.world_size:
                state = load_rank(*(relays, own.job, name, own.rank), into=into, seconds=self._seconds)
            else:
                first = own.rank % len(addresses)  # ranks begin at different relays
                location = AtRelay(addresses[first], own.job, name, (*addresses[first + 1 :], *addresses[:first]))
                token = ClientToken.of(own.token).latest()
                state = load_resharded(location, into, seconds=self._seconds, token=token)
            context.state.load_user_state(state["user"])
        except BaseException:
            context.tear()  # the state may be half written
            raise
        context.progress.resume(state["manager"])
        context.log_progress("loaded")
        self._saved = context.progress.step
        self._writer.resumed(context.progress.step, name, addresses)
        self._tell_lighthouse()
        context.telemetry.resumed(context.progress.step, self._settings.every, float(choice["committed"]))
        context.log.info("resumed from a durable checkpoint", step=context.progress.step, id=name, relays=addresses)
        return True

    # ---- the end

    def close(self, *, finish: bool) -> None:
        """End the writer. May be called more than once.

        Args:
            finish: write a checkpoint that is due, and wait until it is committed.
        """
        fatal = self._context.fatal
        if finish and script_error() == "" and (fatal is None or isinstance(fatal, Drained)):
            if fatal is None:
                self._save_if_due()
            if not self._writer.finish(COMMIT_SECONDS):
                what = f"last durable checkpoint not committed within {COMMIT_SECONDS:g} s; check the relays"
                self._context.log.error(what, step=self._writer.last.uploading)
        self._writer.close()


def value_of_rank_0(store: Store, key: str, seconds: float, still_waiting: Callable[[], None]) -> bytes:
    """Wait until rank 0 has set ``key``. It may come to its first step later than the other ranks.

    Args:
        store: of the ranks of this group.
        key: that rank 0 sets.
        seconds: of each of ``RANK_0_ROUNDS`` waits.
        still_waiting: called after each of them; raises the error that ended the group, if one has.

    Raises:
        KeepstepError: rank 0 has not set it.
    """
    for _ in range(RANK_0_ROUNDS):
        try:
            store.wait([key], timedelta(seconds=seconds))
        except DistStoreError:
            still_waiting()
        else:
            return store.get(key)
    raise KeepstepError(
        f"rank 0 of this group did not begin its first step within {RANK_0_ROUNDS * seconds:g} s; its log says why"
    )
