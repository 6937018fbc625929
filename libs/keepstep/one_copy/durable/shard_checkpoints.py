"""The durable checkpoints of one rank: its shard is written with those of all ranks, and a job resumes from them.

All ranks of a world store their shards of a step under one name. A relay commits it when it has all of them. They are
staged when the next step begins, because the script has changed its own states by then, and uploaded in the background.
A rank that takes the place of another at that step stores the shard again.

If no living rank has shards, or shards are lost, all ranks of the quorum load the newest checkpoint: each its own
shard, if the number of ranks is that of the checkpoint, or else the parts that its new shard needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.distributed import Store

from keepstep.checkpoint.managed.due_checkpoints import Commit, choose_relays, follow_seconds, is_due
from keepstep.checkpoint.managed.durable_upload import COMMIT_SECONDS, Ticket
from keepstep.checkpoint.managed.durable_writer import DurableWriter, LastCheckpoint
from keepstep.checkpoint.managed.newest_checkpoint import LIST_SECONDS
from keepstep.checkpoint.managed.rank_agreement import Choice, RankAgreement
from keepstep.checkpoint.managed.stored_states import StoredStates
from keepstep.connection.rate_limiter import RateLimiter
from keepstep.lifecycle.job_relays import JobRelays
from keepstep.lifecycle.manager_settings import DurableSettings
from keepstep.one_copy.copies.rank_state import OtherModelError
from keepstep.one_copy.core.holding import State
from keepstep.one_copy.durable.stored_shard import receiver, restore, stored
from keepstep.one_copy.member_link import MemberLink
from keepstep.one_copy.shard.own_shard import Held, OwnShard
from keepstep.relay_client.relay_requests import RelayCheckpoint
from keepstep.runtime import environment
from keepstep.state.errors import StateDamaged, StateMismatch
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.lineage import loaded, origin
from keepstep_mesh.protocol.membership import Lineage

log = get_logger("keepstep.durable")


class ShardCheckpoints:
    """Writes the shard of this rank, and finds the checkpoints of the job.

    Args:
        settings: of the checkpoints.
        member: this one.
        shard: of this rank.
        written: called at the end of each write, as ``StepReports.durable``.
        found: called with the checkpoint that this rank was loaded from, as ``StepReports.resumed``.
        seconds: time without progress after which an upload or a load fails.
    """

    def __init__(
        self,
        settings: DurableSettings,
        member: MemberLink,
        shard: OwnShard,
        *,
        written: Callable[[int, int, int, float, str], None],
        found: Callable[[int, int, float, Iterable[str]], None],
        seconds: float,
    ) -> None:
        self._settings = settings
        self._member = member
        self._shard = shard
        self._written = written
        self._found = found
        self._seconds = seconds
        self._relays = JobRelays(member.settings, settings, member.link)
        self._writer = DurableWriter(
            seconds=seconds,
            newest_wins=settings.newest_wins,
            limiter=RateLimiter(environment.rate("UPLINK_BYTES_PER_SECOND")),
            report=self._report,
        )
        self._saved: tuple[int, tuple[int, Lineage]] | None = None
        """Number of the world, and the state, of the last checkpoint that this process staged or was loaded from."""
        self._looked = False

    @property
    def last(self) -> LastCheckpoint:
        """Knowledge of this rank about the checkpoints of its job."""
        return self._writer.last

    def _report(self, step: int, nbytes: int, seconds: float, error: str) -> None:
        self._written(step, self._settings.every, nbytes, seconds, error)
        if not error:
            self._relays.tell_lighthouse(self.last.relays)

    # ---- writing

    def before_step(self, epoch: int) -> None:
        """Stage the shard, if a checkpoint of its state is due. In all ranks, at the begin of a step.

        Args:
            epoch: of the lighthouse.
        """
        held = self._shard.now()
        world, state = held.world.number, (held.state.step, held.state.lineage)
        saved = self._saved[1] if self._saved is not None and self._saved[0] == world else None
        if not is_due(state, self._settings.every, saved):
            return
        self._saved = world, state
        writer, relays = self._writer, self._relays.known()
        endpoints = [
            relays[one]
            for one in choose_relays(writer.usable(relays), self._member.settings.job, self._settings.copies)
        ]
        if not endpoints:
            writer.failed(state[0], "no relay is registered with the lighthouse; start one (keepstep relay)")
            return
        ticket = self._ticket(epoch, held, spare_relays=len(relays) > self._settings.copies)
        try:
            shared = {name: one.state_dict() for name, one in self._shard.others(held.built).items()}
            writer.offer(ticket, endpoints, stored(held, shared))
        except TimeoutError as error:
            writer.failed(state[0], str(error))
        except Exception as error:  # noqa: BLE001  a checkpoint that fails does not stop training
            writer.refuse(ticket, endpoints, f"{type(error).__name__}: {error}")

    def _ticket(self, epoch: int, held: Held, *, spare_relays: bool) -> Ticket:
        world, state, producer = held.world, held.state, self._member.replica_id
        quorum_id = origin(state.lineage).quorum_id
        commit = Commit(epoch, quorum_id, state.step, (f"world {world.number}", f"{world.size} ranks"))
        return Ticket(
            checkpoint=RelayCheckpoint(self._member.settings.job, commit.checkpoint_id(), held.rank, producer),
            step=state.step,
            facts={
                "step": state.step,
                "kind": "durable",
                "ranks": world.size,
                "quorum_id": quorum_id,
                "one_producer": False,
            },
            uploaders=(producer,),
            follow_seconds=follow_seconds(world.size),
            spare_relays=spare_relays,
        )

    def hurry(self) -> None:
        """Fail uploads soon that wait for a rank which is lost. From any thread."""
        self._writer.hurry()

    def finish(self) -> None:
        """Wait until the last checkpoint is committed."""
        if not self._writer.finish(COMMIT_SECONDS):
            what = f"last durable checkpoint not committed within {COMMIT_SECONDS:g} s; check the relays"
            log.error(what, step=self._writer.last.uploading)

    def close(self) -> None:
        """End the uploads."""
        self._writer.close()

    # ---- resuming

    def newest_state(self) -> State | None:
        """Return the state from which the job would resume; None: another member has a live state, or no relay has one.

        Members ask for their first quorum with it, because the job goes back if they ask for less. Only the first call
        looks.

        Raises:
            KeepstepError: the relays did not answer.
        """
        if self._looked or not self._settings.resumes or self._member.link.live_step:
            return None
        self._looked = True
        own = self._member.settings
        known = self._relays.stored_states(own.rank, own.world_size, self._seconds)
        agreement = RankAgreement(lambda: self._member.store, own.rank, own.world_size, own.restart, log.warning)
        choice = agreement.choice(known.newest, self._list_seconds(known))
        return State(int(choice["step"]), loaded(int(choice["quorum_id"]))) if choice else None

    def newest(self, store: Store, rank: int, ranks: int, ended: Callable[[], str]) -> StoredShards | None:
        """Return the newest checkpoint, in all ranks of a world. None: the job has none, or does not resume.

        Args:
            store: of the ranks.
            rank: of this process in the world.
            ranks: of the world.
            ended: returns why waits end early; empty: they go on.

        Raises:
            KeepstepError: the relays did not answer, or have only damaged ones.
        """
        if not self._settings.resumes:
            return None

        def still_waiting(why: str) -> None:
            if reason := ended():
                raise KeepstepError(reason)
            log.warning(why)

        known = self._relays.stored_states(rank, ranks, self._seconds)
        agreement = RankAgreement(lambda: store, rank, ranks, 0, still_waiting)
        choice = agreement.choice(known.newest, self._list_seconds(known))
        return StoredShards(known, agreement, choice, self._seconds, self._list_seconds(known)) if choice else None

    @staticmethod
    def _list_seconds(known: StoredStates) -> float:
        return max(known.connect_seconds, known.resume_wait) + 2 * LIST_SECONDS

    def resumed(self, held: Held, found: StoredShards) -> None:
        """Note that ``held`` is loaded from ``found``."""
        choice, step = found.choice, held.state.step
        self._saved = held.world.number, (step, held.state.lineage)
        name, addresses, skipped = str(choice["id"]), tuple(choice["relays"]), choice["skipped"]
        self._writer.resumed(step, name, addresses, tuple(skipped.values()))
        self._relays.tell_lighthouse(addresses)
        self._found(step, self._settings.every, float(choice["committed"]), skipped)
        if skipped:
            what = "skipped damaged durable checkpoints; their steps are trained again"
            log.error(what, step=step, skipped=list(skipped.values()))
        log.info("resumed from a durable checkpoint", step=step, id=name, relays=addresses)


@dataclass
class StoredShards:
    """A checkpoint that all ranks of a world load."""

    known: StoredStates
    agreement: RankAgreement
    choice: Choice
    seconds: float
    """Of each of ``RANK_ROUNDS`` waits for ranks that still load."""
    list_seconds: float
    """For relays to list what they have."""

    def load(self, held: Held, shard: OwnShard) -> None:
        """Load the shard of this rank into a model that was just built; an older checkpoint, if this one is damaged.

        Args:
            held: with that model. Its ``state`` is set.
            shard: of this rank, for the states that all ranks have in common, and random numbers.

        Raises:
            StateMismatch: the checkpoint is of another model, or another optimizer. The other ranks go on.
            KeepstepError: no checkpoint is whole, or another rank could not load it.
        """
        while True:
            choice, misfit = self.choice, None
            try:
                try:
                    state = self.known.load(choice, receiver(held.tensors))
                except StateMismatch:  # as many ranks as before, in another mesh
                    choice = {**choice, "ranks": 0}
                    state = self.known.load(choice, receiver(held.tensors))
                rest = restore(held, state, same_rank=int(choice["ranks"]) == held.world.size)
            except StateDamaged as error:
                damage = self.agreement.damage(str(error), seconds=self.seconds)
            except (StateMismatch, OtherModelError) as error:
                misfit, damage = StateMismatch(str(error)), self.agreement.damage(seconds=self.seconds)
            except BaseException as error:
                self.agreement.damage(error=f"{type(error).__name__}: {error}", seconds=self.seconds)
                raise
            else:
                damage = self.agreement.damage(seconds=self.seconds)
            if misfit is not None and not damage:
                raise misfit
            if not damage:
                shard.load_others(held, rest["shared"])
                if rest["random"]:
                    shard.continue_random(rest["random"])
                shard.note_buffers(held)
                return
            self.known.note_damage(choice, damage)
            log.error("durable checkpoint is damaged", step=choice["step"], id=choice["id"], reason=damage)
            self.choice = self.agreement.choice(self.known.newest, self.list_seconds)
