"""Durable checkpoints of one Manager: when they are written, and what a job without a live state resumes from.

The state of step n is complete when the script has stepped its optimizer, so it is staged when step n + 1 begins. All
groups stage it, and upload a share each. A group that begins at step 0 loads the newest checkpoint, unless another
group has a live state from which it heals. All groups of a job thus load the same one; if they do not, those that are
behind heal from the others.

With ``finish(publish=True)`` the groups write one of the final state too. A group that comes after the end loads it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim.optimizer import register_optimizer_step_pre_hook

from keepstep.checkpoint.managed.due_checkpoints import (
    MAX_UPLOADERS,
    Commit,
    Held,
    choose_relays,
    follow_seconds,
    is_due,
)
from keepstep.checkpoint.managed.durable_upload import COMMIT_SECONDS, Ticket
from keepstep.checkpoint.managed.durable_writer import DurableWriter, LastCheckpoint
from keepstep.checkpoint.managed.newest_checkpoint import LIST_SECONDS
from keepstep.checkpoint.managed.rank_agreement import Choice, RankAgreement
from keepstep.connection.rate_limiter import RateLimiter
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.lifecycle.job_relays import JobRelays
from keepstep.lifecycle.manager_settings import ManagerSettings
from keepstep.relay_client.relay_requests import RelayCheckpoint
from keepstep.runtime.exits import JobClosedExit, StateMismatchExit
from keepstep.state.errors import StateDamaged, StateMismatch
from keepstep.step.context import StepContext
from keepstep_mesh.errors import Drained, JobClosed, KeepstepError
from keepstep_mesh.protocol.lineage import NEW, Soundness, is_diverged, is_live, origin, same_weights, soundness

HOW_TO_FIT = (
    "; before its first step the script must have all models, optimizers and states of the checkpoint, also those that "
    "it added in a later step"
)


class Durability:
    """The durable checkpoints of one rank.

    Args:
        settings: of the Manager.
        context: of its steps.
    """

    def __init__(self, settings: ManagerSettings, context: StepContext) -> None:
        own = settings.link
        self._settings = settings.durable
        self._context = context
        self._relays = JobRelays(own, self._settings, context.link)
        self._seconds = settings.timeout.total_seconds()
        self._writer = DurableWriter(
            seconds=self._seconds,
            newest_wins=self._settings.newest_wins,
            limiter=RateLimiter(settings.uplink),
            report=self._report,
        )
        self._commit: tuple[QuorumPlan, Held] | None = None
        """The last committed step: its plan, and the state after it."""
        self._attempts = 0
        """Number of checkpoints of that state."""
        self._saved: Held | None = None
        """The state of the last checkpoint that this process staged, or was loaded from."""
        self._told_of_end = False
        """Whether the script learned in a step that the job is closed, at the state that it has since then."""
        self._looked = False
        self._agreement = RankAgreement(
            lambda: context.store, own.rank, own.world_size, own.restart, self._still_waiting
        )
        self._stored = self._relays.stored_states(own.rank, own.world_size, self._seconds)
        self.may_resume = False
        """See ``DurableStates``."""
        self._final: tuple[Choice, JobClosed] | None = None
        """The final state that was found and is not loaded yet."""
        context.durable = self
        context.state.settle = self.settle
        self._hook = register_optimizer_step_pre_hook(lambda *_: self.settle()) if self._settings.every else None

    @property
    def last(self) -> LastCheckpoint:
        """Knowledge of this rank about the checkpoints of its job."""
        return self._writer.last

    def _report(self, step: int, nbytes: int, seconds: float, error: str) -> None:
        self._context.telemetry.durable(step, self._settings.every, nbytes, seconds, error)
        if not error:
            self._relays.tell_lighthouse(self.last.relays)

    # ---- writing

    def committed(self, plan: QuorumPlan) -> None:
        """Note that the step of ``plan`` was committed."""
        self._commit, self._attempts = (plan, self._held), 0

    @property
    def _held(self) -> Held:
        return self._context.progress.step, self._context.progress.lineage

    def _last_commit(self) -> tuple[QuorumPlan, Held] | None:
        """Return the last committed step, if this group still has the state after it: it has not gone back."""
        commit, (step, lineage) = self._commit, self._held
        if commit is None or commit[1] == (step, lineage):
            return commit
        return commit if is_diverged(lineage) and commit[1][0] == step else None

    def before_step(self) -> None:
        """Resume in front of the first step; stage the state of the last one, if a checkpoint of it is due."""
        self.resume_if_set()
        self._save_if_due(late=True)

    def settle(self) -> None:
        """Wait until the state may change: what no pass writes to is copied beside the step that follows it."""
        self._writer.settle()

    def _save_if_due(self, *, late: bool = False) -> None:
        commit = self._last_commit()
        if commit is not None and is_due(commit[1], self._settings.every, self._saved):
            self._save(*commit, late=late)

    def save(self) -> LastCheckpoint:
        """Stage the state now. RuntimeError if it is not that of a step that this process committed."""
        commit = self._last_commit()
        if commit is None:
            raise RuntimeError(
                f"no step has been committed since this process started, healed, or loaded a state (step "
                f"{self._held[0]}); call save_checkpoint() after a step that committed, and before the next one begins"
            )
        before = self.last
        self._save(*commit)
        return before

    def publish(self, seconds: float | None) -> bool:
        """Write the state of the last step, if this process committed it, and wait until a relay has it.

        Args:
            seconds: limit of the wait; None: that of an upload.

        Returns:
            Whether nothing is left to write.
        """
        commit = self._last_commit()
        if commit is None:
            return True
        if self._saved != commit[1]:
            self._save(*commit)
        limit = COMMIT_SECONDS if seconds is None else seconds
        written = self._writer.finish(limit)
        if not written:
            self._context.log.error("final state not published yet", step=commit[1][0], waited_seconds=limit)
        return written

    def _save(self, plan: QuorumPlan, held: Held, *, late: bool = False) -> None:
        context, writer, step = self._context, self._writer, held[0]
        self._saved = held
        self._attempts += 1
        relays = self._relays.known()
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
            writer.offer(ticket, endpoints, state, late=late)
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
            follow_seconds=follow_seconds(len(commit.members) * own.world_size),
            spare_relays=spare_relays,
        )

    # ---- resuming

    def resume_if_set(self) -> None:
        """Call ``resume`` if the settings say so. StateMismatchExit: a checkpoint does not fit, nor after a restart."""
        if self._settings.resumes:
            try:
                self.resume()
            except StateMismatch as error:
                self._context.end_group(StateMismatchExit(f"durable checkpoint does not fit: {error}{HOW_TO_FIT}"))

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
        choice = self._load_first_whole(self._choose_unless_live)
        if "live" in choice or context.asks.stands_by:  # the groups may be gone when a spare gets its place
            self.may_resume = True
        return bool(choice) and "live" not in choice

    def _is_new(self) -> bool:
        lineage = self._context.progress.lineage
        return lineage == "" or (isinstance(lineage, str) and lineage.startswith(NEW))

    def _choose_unless_live(self) -> Choice:
        """Return {"live": step} if another group has a live state: this group heals from it."""
        if live_step := self._context.link.live_step:
            return {"live": live_step}
        return self._stored.newest()

    def resume_in_quorum(self, plan: QuorumPlan | None) -> bool:
        """See ``DurableStates``."""
        self.may_resume = False
        if plan is not None and is_live(plan.max_step, plan.lineage):
            return False
        known = (0, 0) if plan is None else (origin(plan.lineage).quorum_id, plan.max_step)  # as in ``newest``

        def choose() -> Choice:
            choice = self._stored.newest()
            if choice and (choice["quorum_id"], choice["step"]) > known:
                return choice
            if self._context.progress.torn:
                raise KeepstepError(
                    "a newer durable checkpoint is damaged, and was loaded in part; start this group again"
                )
            return {}

        return bool(self._load_first_whole(choose))

    def find_final(self, closed: JobClosed) -> None:
        """Find the final state of a closed job at a relay. The attempt then loads it. In all ranks of the group.

        Raises:
            JobClosedExit: no relay has it, or this group has it and wants to train on.
        """
        context = self._context
        told, self._told_of_end = self._told_of_end, True
        if context.progress.step == closed.step and same_weights(context.progress.lineage, closed.lineage):
            if not told and self._commit is None and self._saved == self._held:
                return  # this group resumed from it in this step, and its script does not know yet
            context.end_with(JobClosedExit(str(closed)))
        choice = self._agree(lambda: self._choose_final(closed))
        if why_not := choice.get("why_not"):
            context.end_with(JobClosedExit(f"{closed}; the final state was not loaded: {why_not}"))
        self._final = choice, closed

    def load_final(self) -> None:
        """See ``DurableStates``."""
        if self._final is None:
            return
        (choice, closed), self._final = self._final, None
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
        return self._stored.final(closed.step, origin(closed.lineage).quorum_id)

    def _agree(self, choose: Callable[[], Choice]) -> Choice:
        """Return the choice of rank 0 in every rank of this group."""
        seconds = max(self._stored.connect_seconds, self._settings.resume_wait) + 2 * LIST_SECONDS
        return self._agreement.choice(choose, seconds)

    def _still_waiting(self, why: str) -> None:
        self._context.raise_fatal()
        self._context.log.warning(why)

    def _load_first_whole(self, choose: Callable[[], Choice]) -> Choice:
        """Load the checkpoint that ``choose`` returns in rank 0; again if it is damaged. Return what it chose last."""
        while True:
            choice = self._agree(choose)
            if not choice:
                self._context.log.info("no durable checkpoint to load")
            if not choice or "live" in choice:
                return choice
            try:
                self._load(choice)
            except StateDamaged as error:
                self._stored.note_damage(choice, str(error))
                self._context.log.error(
                    "durable checkpoint is damaged", step=choice["step"], id=choice["id"], reason=str(error)
                )
            else:
                return choice

    def _load(self, choice: Choice) -> None:
        """Load a checkpoint. Raises ``StateDamaged`` in all ranks if it is damaged for one of them."""
        context = self._context
        self.settle()
        try:
            state = self._stored.load(choice, context.state.snapshot())
        except StateDamaged as error:
            context.tear()  # the state may be half written
            raise StateDamaged(self._agreement.damage(str(error), seconds=self._seconds)) from error
        except BaseException as error:
            context.tear()
            self._agreement.damage(error=f"{type(error).__name__}: {error}", seconds=self._seconds)
            raise
        try:
            if damage := self._agreement.damage(seconds=self._seconds):
                raise StateDamaged(damage)
            loaded = context.state.load_user_state(state["user"])
        except BaseException:
            context.tear()
            raise
        context.progress.resume(state["manager"])
        context.state.check_loaded(loaded)
        context.log_progress("loaded")
        self._saved = self._held
        name, addresses, skipped = str(choice["id"]), tuple(choice["relays"]), choice.get("skipped", {})
        self._writer.resumed(context.progress.step, name, addresses, tuple(skipped.values()))
        self._relays.tell_lighthouse(self.last.relays)
        committed = float(choice["committed"])
        context.telemetry.resumed(context.progress.step, self._settings.every, committed, skipped)
        if skipped:
            what = "skipped damaged durable checkpoints; their steps are trained again"
            context.log.error(what, step=context.progress.step, skipped=list(skipped.values()))
        context.log.info("resumed from a durable checkpoint", step=context.progress.step, id=name, relays=addresses)

    # ---- the end

    def close(self, *, finish: bool) -> None:
        """End the writer. May be called more than once.

        Args:
            finish: write a checkpoint that is due, and wait until it is committed.
        """
        fatal = self._context.fatal
        if finish and (fatal is None or isinstance(fatal, Drained)):
            if fatal is None:
                self._save_if_due()
            if not self._writer.finish(COMMIT_SECONDS):
                what = f"last durable checkpoint not committed within {COMMIT_SECONDS:g} s; check the relays"
                self._context.log.error(what, step=self._writer.last.uploading)
        self._writer.close()
        if self._hook is not None:
            self._hook.remove()
