"""A job whose model exists once: the face for training scripts."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from keepstep.group.group_link import LinkSettings
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.one_copy.copies.copy_sender import CopySender
from keepstep.one_copy.copies.copy_server import CopyServer, Served
from keepstep.one_copy.copies.frames import CopyError
from keepstep.one_copy.copies.keeper import Keeper
from keepstep.one_copy.copies.rank_state import RankState
from keepstep.one_copy.copies.replay import can_replay
from keepstep.one_copy.copies.shard_reader import ShardReader
from keepstep.one_copy.core.holding import Holding, State
from keepstep.one_copy.core.mesh_shape import MeshShape
from keepstep.one_copy.core.recovery_plan import Kind, Recovery, Way, plan_recovery
from keepstep.one_copy.core.world import World, keepers
from keepstep.one_copy.held import Built, Held, Stateful, end_broken_pass, random_state, restore_random_state
from keepstep.one_copy.member_link import MemberLink
from keepstep.one_copy.recovery.meeting import GROUPS, Meeting
from keepstep.one_copy.recovery.recovering import Sources, serving
from keepstep.one_copy.world.world_groups import WorldGroups
from keepstep.process_group.group_errors import ProcessGroupError
from keepstep.runtime import environment
from keepstep.runtime.host_memory import available_bytes, ranks_of_host
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import JobClosed, KeepstepError
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.job_settings import settings_text
from keepstep_mesh.protocol.lineage import NEW
from keepstep_mesh.security.tokens import ClientToken

log = get_logger("keepstep.one_copy")

LOSS_SECONDS = 1.0
"""Longest wait for news of a loss, after an error that a loss may have caused."""
UNFIT_SECONDS = 0.5
"""Pause before the next quorum when the members do not fill the mesh."""
FREE_SHARE = 0.8
"""Part of the free memory of a host that copies may take."""


class StateLost(KeepstepError):
    """A member and its keepers were lost together, and no checkpoint has its shard."""


class _AgainError(Exception):
    """The recovery has to begin again with another quorum."""


class OneCopy:
    """Trains a model that exists once: each rank of all members holds a shard.

    Each step is committed by all ranks together. Before that, each rank has sent what the step changes to the memory of
    a keeper, a rank on another host. A lost member costs a repeated step: a spare takes its place and reads its shard
    from its keeper, or the model is cut again for the ranks that are left.

    It initialises ``torch.distributed`` with the ranks of all members.

    Args:
        build: gets the ``DeviceMesh``, and returns the model and the optimizer of this rank, and perhaps schedulers and
            other objects with a ``state_dict``. It is called at the start and after a change of the number of ranks;
            collectives in it do nothing. Schedulers are stepped by ``commit``.
        init: gets the model when the job begins, and sets its first weights; None: those of ``build`` stay.
        mesh: size of each dimension of the mesh by name, one of them -1.
        device_type: ``"cuda"`` or ``"cpu"``. Default: CUDA, if this machine has a device.
        copies: number of keepers of each rank. With 2, two members may be lost together.
        memory: limit of the copies that this process keeps, in bytes; default: what is free.
        refuse_nonfinite: drop a step in which a rank has a NaN or an infinity in its gradients.
        timeout: limit of collectives and transfers.
        quorum_timeout: limit of a request for a quorum, after which it is asked again.
        connect_timeout: limit of the first connection.
        lighthouse_addr: default: ``KEEPSTEP_LIGHTHOUSE``.
        replica_id: name of this member. Default: as for ``Manager``.
        rank: rank within the member. Default: ``RANK``.
        world_size: number of ranks of the member. Default: ``WORLD_SIZE``.

    Raises:
        ValueError, TimeoutError, KeepstepError: as ``Manager``.
    """

    def __init__(
        self,
        build: Callable[[Any], Any],
        init: Callable[[nn.Module], object] | None = None,
        *,
        mesh: Mapping[str, int] | None = None,
        device_type: str | None = None,
        copies: int = 1,
        memory: int | None = None,
        refuse_nonfinite: bool = False,
        timeout: timedelta = timedelta(seconds=60),
        quorum_timeout: timedelta = timedelta(seconds=60),
        connect_timeout: timedelta = timedelta(seconds=60),
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if copies < 1:
            raise ValueError(f"copies={copies} must be at least 1; it is the number of keepers of each rank")
        self._build, self._init = build, init
        self._shape = MeshShape(mesh or {"fsdp": -1})
        self._copies = copies
        self._refuse_nonfinite = refuse_nonfinite
        self._timeout = environment.seconds("TIMEOUT_SEC", timeout)
        self._quorum_timeout = environment.seconds("QUORUM_TIMEOUT_SEC", quorum_timeout)
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        self._settings = LinkSettings.from_arguments(
            lighthouse_addr=lighthouse_addr,
            replica_id=replica_id,
            rank=environment.from_launcher("RANK", rank, 0),
            world_size=environment.from_launcher("WORLD_SIZE", world_size, 1),
            store_addr=None,
            store_port=None,
            port=None,
            hostname=None,
            heartbeat_interval=0.1,
            connect_timeout=environment.seconds("CONNECT_TIMEOUT_SEC", connect_timeout).total_seconds(),
            quorum_retries=0,
        )
        self._domain = environment.variable("DOMAIN") or socket.gethostname()
        self._token = ClientToken.of(self._settings.token)
        self._groups = WorldGroups(self._shape, device_type, self._timeout)
        arithmetic = {
            "one_copy": ",".join(f"{name}={size}" for name, size in self._shape.sizes.items()),
            "copies": copies,
            "ranks": self._settings.world_size,
            "refuse_nonfinite": refuse_nonfinite,
        }
        self._meeting: Meeting | None = None
        self._quorum: QuorumPlan | None = None
        self._broken = ""
        """Why the groups of the world are not usable; empty: they are."""
        self._failures = 0
        self._held: Held | None = None
        self._rebuilt: Held | None = None
        self._sender: CopySender | None = None
        self._voted = 0
        self._whole = True
        self._in_attempt = self._committed = False
        self._shared: dict[str, Stateful] = {}
        self._before: dict[str, Any] = {}
        """Buffers and random state at the last commit."""
        self._membership = MemberLink(self._settings, settings_text(arithmetic), self._on_lost)
        self._device = torch.device(device_type)
        self._keeper = Keeper(self._optimizer, self._device, self._room(memory))
        self._server = CopyServer(self._settings.host, self._token, self._keeper, self._timeout.total_seconds())

    def _room(self, most: int | None) -> Callable[[], int]:
        def room() -> int:
            free = int(available_bytes() * FREE_SHARE) // ranks_of_host()
            return free if most is None else max(0, min(free, most - self._keeper.nbytes))

        return room

    def _optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self._held is None:
            raise CopyError("this process has no optimizer yet")
        return type(self._held.built.optimizer)(*args, **kwargs)

    # ---- facts

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self._held.state.step if self._held is not None else 0

    @property
    def rank(self) -> int:
        """Rank of this process among the ranks of all members."""
        return self._now().rank

    @property
    def world_size(self) -> int:
        """Number of ranks of all members."""
        return self._now().world.size

    @property
    def model(self) -> nn.Module:
        """The model of this rank. It changes with the number of ranks."""
        return self._now().built.model

    @property
    def replica_id(self) -> str:
        """Name of this member."""
        return self._membership.replica_id

    @property
    def exposed(self) -> Mapping[str, str]:
        """Keepers of this rank that have no copies of it, and the reason."""
        return self._sender.exposed if self._sender is not None else {}

    @property
    def copies_bytes(self) -> int:
        """Bytes of the copies of other ranks that this process keeps."""
        return self._keeper.nbytes

    def _now(self) -> Held:
        if self._held is None:
            raise RuntimeError("the job has not begun: the first attempt() builds the model")
        return self._held

    def register(self, name: str, state: Stateful) -> None:
        """Let ``state`` go with the model: a sampler, a scaler, what is equal in all ranks.

        A member that takes the place of another gets it from a rank that has committed the same step.

        Args:
            name: unique.
            state: has ``state_dict`` and ``load_state_dict``.
        """
        if name in self._shared:
            raise ValueError(f"a state {name!r} is registered already; use another name")
        self._shared[name] = state

    # ---- a step

    @contextlib.contextmanager
    def attempt(self) -> Iterator[tuple[Any, ...]]:
        """Try one step. Use it in a loop over ``step``, with ``commit`` at its end.

        If a member is lost, the block is left where the error occurred, without an error, and the next attempt takes
        the same step again.

        Yields:
            The objects that ``build`` returned.
        """
        self._ready()
        held = self._now()
        self._in_attempt, self._committed = True, False
        if self._sender is not None:
            self._sender.begin(held.state, self._end)
        try:
            yield held.built.objects
        except Exception as error:
            if not self._is_loss(error):
                raise
            log.warning("step failed", step=held.state.step, reason=str(error) or type(error).__name__)
            self._whole = not self._committed
            self._break(f"rank {self.rank}: {error}")
        else:
            if not self._committed and self._in_attempt:
                held.built.optimizer.zero_grad()
        finally:
            self._in_attempt = False

    def commit(self) -> bool:
        """End the step: agree with all ranks, step the optimizer and the schedulers, and clear the gradients.

        Returns:
            Whether the step was committed. False: a rank has refused it.

        Raises:
            Exception: a member was lost; the attempt handles it.
        """
        if not self._in_attempt or self._committed:
            raise RuntimeError("commit() belongs at the end of `with job.attempt()`, once in each")
        held, quorum = self._now(), self._quorum
        assert quorum is not None
        ok = not self._refuse_nonfinite or self._finite(held)
        following = held.state.after(quorum.quorum_id)
        if self._sender is not None:
            self._sender.finish(following, self._end())
        self._raise_if_lost()
        self._voted = quorum.quorum_id
        values = self._groups.vote([int(ok), held.state.step, -held.state.step], self._timeout)
        if values[1] != -values[2]:
            raise KeepstepError(f"the ranks are at different steps, {values[1]} to {-values[2]}; report this as a bug")
        if not values[0]:
            self._drop(held)
            return False
        self._apply(held, following)
        self._committed = True
        self._membership.committed()
        self._keeper.forget(but=self._kept(held.world))
        return True

    def _apply(self, held: Held, following: State) -> None:
        held.built.optimizer.step()
        held.built.optimizer.zero_grad()
        for one in held.built.schedulers:
            one.step()
        held.state, self._voted, self._failures, self._whole = following, 0, 0, True
        self._before = self._volatile(held)

    def _drop(self, held: Held) -> None:
        self._voted = 0
        held.built.optimizer.zero_grad()
        self._restore(held)

    @staticmethod
    def _finite(held: Held) -> bool:
        return all(
            bool(torch.isfinite(one).all())
            for number in range(len(held.tensors.slices))
            for one in held.tensors.gradients(number).values()
        )

    def _volatile(self, held: Held) -> dict[str, Any]:
        """Return a copy of what the passes of a step change beside the gradients."""
        return {"buffers": {k: v.clone() for k, v in held.tensors.buffers().items()}, "random": random_state()}

    def _restore(self, held: Held) -> None:
        """Undo what the passes of a dropped step have changed."""
        held.tensors.load_buffers(self._before["buffers"])
        restore_random_state(self._before["random"])

    def _end(self) -> dict[str, Any]:
        held = self._now()
        return {"options": held.tensors.options(), "buffers": held.tensors.buffers(), "random": random_state()}

    # ---- losses

    def _on_lost(self, quorum_id: int, reason: str) -> None:
        """End all waits of a quorum. From the event-loop thread."""
        quorum = self._quorum
        if quorum_id >= 0 and (quorum is None or quorum.quorum_id != quorum_id):
            return
        if self._sender is not None:
            self._sender.interrupt(reason)
        if self._meeting is not None:
            self._meeting.end(reason)
        self._groups.abort(reason)

    def _loss(self) -> str:
        """Return why the quorum has ended; empty: it has not."""
        if self._membership.fatal is not None:
            raise self._membership.fatal
        return self._membership.loss_of(self._quorum.quorum_id) if self._quorum is not None else ""

    def _raise_if_lost(self) -> None:
        if reason := self._loss():
            raise CopyError(reason)

    def _is_loss(self, error: Exception) -> bool:
        """Return whether a lost member has caused an error."""
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, (ProcessGroupError, CopyError)):
                return True
            seen = seen.__cause__ or seen.__context__
        deadline = time.monotonic() + (LOSS_SECONDS if isinstance(error, (RuntimeError, TimeoutError)) else 0.0)
        while True:
            if self._loss() or self._groups.errored() is not None:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)  # nothing tells when an error of a group arrives

    def _break(self, reason: str) -> None:
        self._broken = reason
        self._failures += 1
        if self._sender is not None:
            self._sender.interrupt(reason)
        self._groups.abort(reason)

    # ---- before a step

    def _ready(self, *, final: bool = False) -> QuorumPlan:
        """Agree with the others on the members, and recover if they have changed."""
        while True:
            plan = self._ask(final=final)
            known = self._quorum
            if known is not None and plan.quorum_id == known.quorum_id and not self._broken:
                self._quorum = plan
                return plan
            self._quorum = plan
            try:
                self._recover(plan)
            except _AgainError as error:
                self._break(str(error))
                self._failures -= 1
                time.sleep(UNFIT_SECONDS)  # nothing tells when another member comes
            except Exception as error:
                if isinstance(error, StateLost) or not self._is_loss(error):
                    raise
                log.warning("recovery failed; trying again", reason=str(error) or type(error).__name__)
                self._break(str(error))
            else:
                self._broken = ""
                return plan

    def _ask(self, *, final: bool) -> QuorumPlan:
        held = self._held
        state = held.state if held is not None else State(0, f"{NEW}{self.replica_id}")
        ask = RankAsk(
            request=0,
            step=state.step,
            lineage=state.lineage,
            shrink_only=False,
            commit_failures=max(self._failures, 1 if self._broken else 0),
            timeout_ms=0,
            final=final,
        )
        while True:
            try:
                return self._membership.ask(ask, self._quorum_timeout.total_seconds())
            except TimeoutError as error:
                log.warning("no quorum yet; asking again", step=state.step, reason=str(error))

    def _recover(self, plan: QuorumPlan) -> None:
        began = time.monotonic()
        if self._sender is not None:
            self._sender.disconnect()
        meeting = self._meet(plan)
        link, settings = self._membership.link, self._settings
        holdings = meeting.exchange(self._holding(), settings.world_size)
        recovery = plan_recovery(plan.quorum_id, holdings, copies=self._copies, fits=self._shape.fits)
        if recovery.kind is Kind.UNFIT:
            raise _AgainError(
                f"{recovery.world.size} ranks do not fill the mesh {self._shape.sizes}; waiting for another member"
            )
        if recovery.kind is Kind.LOST:
            raise StateLost(self._lost_text(recovery))
        seat = recovery.world.seat_of(link.replica_id)
        assert seat is not None
        rank = recovery.world.rank(seat, settings.rank)
        self._groups.configure(
            rank,
            recovery.world.size,
            plan.quorum_id,
            lambda number: meeting.store(GROUPS + number),
            host=settings.host,
            name=link.replica_id,
        )
        self._raise_if_lost()
        own = next(
            index
            for index, one in enumerate(holdings)
            if (one.replica_id, one.group_rank) == (link.replica_id, settings.rank)
        )
        held = self._brought_to_target(recovery, holdings, own, rank)
        self._rebuilt = held if held is not self._held else None
        self._connect_copies(recovery, holdings, held)
        self._groups.vote([1], self._timeout)
        self._adopt(held)
        log.info(
            "world formed",
            kind=recovery.kind.value,
            step=held.state.step,
            rank=rank,
            ranks=recovery.world.size,
            seconds=round(time.monotonic() - began, 3),
        )

    def _meet(self, plan: QuorumPlan) -> Meeting:
        if self._meeting is not None:
            self._meeting.close()
        link = self._membership.link
        self._meeting = Meeting(
            plan,
            job=self._settings.job,
            token=self._token,
            key_values=link.key_values,
            own_address=link.address,
            timeout=self._timeout,
        )
        if reason := self._loss():
            self._meeting.end(reason)
        return self._meeting

    def _holding(self) -> Holding:
        link, held, rebuilt = self._membership.link, self._held, self._rebuilt
        mine = Holding(
            link.replica_id,
            self._settings.rank,
            self._domain,
            self._server.address,
            whole=self._whole,
            copies=self._keeper.copies(),
        )
        if held is not None:
            mine = replace(mine, world=held.world, rank=held.rank, state=held.state, voted=self._voted)
        if rebuilt is not None:
            mine = replace(mine, rebuilt=rebuilt.world, rebuilt_rank=rebuilt.rank, state=rebuilt.state)
        return mine

    def _brought_to_target(self, recovery: Recovery, holdings: list[Holding], own: int, rank: int) -> Held:
        """Return the shard of this rank at the target."""
        if recovery.kind is Kind.FRESH:
            return self._begun(recovery.world, rank)
        previous, target = recovery.previous, recovery.target
        assert previous is not None
        assert target is not None
        if self._rebuilt is not None and previous.number == self._rebuilt.world.number:
            self._held, self._voted = self._rebuilt, 0  # the others have learned that all shards of it are whole
        self._rebuilt = None
        reader = ShardReader(self._token, previous.number, target, self._timeout.total_seconds(), self._loss)
        sources = Sources(recovery, holdings, reader)
        source = next((one for one in recovery.sources if one.holder == own and one.way is not Way.COPY), None)
        held = self._held
        if source is not None and held is not None:
            self._settle(held, target, source.way, sources, shared=recovery.shared == own)
            served = self._served(held, previous.number, source.rank)
        else:
            served = None
        with serving(self._server, served):
            if rank in recovery.building:
                held = self._read(recovery, sources, own, rank, target)
            assert held is not None
            held.world, held.rank = recovery.world, rank
            self._groups.vote([0], self._timeout)  # all have read
        return held

    def _settle(self, held: Held, target: State, way: Way, sources: Sources, *, shared: bool) -> None:
        """Bring a shard that this rank has to the target, and make its model usable again."""
        if way is Way.FORWARD:
            self._apply(held, target)
        else:
            self._voted = 0
        usable = end_broken_pass(held.built.model)
        if not usable:
            self._build_again(held)
        self._restore(held)
        if not shared and (way is Way.FORWARD or not self._whole):
            self._load_shared(held, sources.shared()["shared"])
        self._whole = True

    def _build_again(self, held: Held) -> None:
        """Put the shard into a new model: the passes of the old one cannot be ended."""
        states, options = (
            [held.tensors.base(number) for number in range(len(held.tensors.slices))],
            held.tensors.options(),
        )
        buffers, others = held.tensors.buffers(), {name: one.state_dict() for name, one in held.built.others().items()}
        self._fill_built(held, self._built())
        held.tensors.load(states, options)
        held.tensors.load_buffers(buffers)
        for name, one in held.built.others().items():
            one.load_state_dict(others[name])

    @staticmethod
    def _fill_built(held: Held, built: Built) -> None:
        held.built, held.tensors = built, RankState(built.model, built.optimizer)

    def _served(self, held: Held, number: int, rank: int) -> Served:
        shared = {**self._shared, **held.built.others()}
        return Served(
            *(number, rank, held.state, len(held.tensors.slices)),
            slice_of=held.tensors.base,
            end=self._end(),
            shared={name: one.state_dict() for name, one in shared.items()},
            boxes=held.tensors.boxes(),
        )

    def _built(self) -> Built:
        with self._groups.muted():
            return Built.of(self._build(self._groups.mesh()))

    def _begun(self, world: World, rank: int) -> Held:
        built = self._built()
        if self._init is not None:
            self._init(built.model)
        held = Held(world, rank, State(0, f"{NEW}one-copy"), built, RankState(built.model, built.optimizer))
        self._before = self._volatile(held)
        return held

    def _read(self, recovery: Recovery, sources: Sources, own: int, rank: int, target: State) -> Held:
        """Build the model, and read the shard of this rank."""
        built = self._built()
        tensors = RankState(built.model, built.optimizer)
        held = Held(recovery.world, rank, target, built, tensors)
        if recovery.kind is Kind.REPLACED:
            shard, rest = sources.shard_of(rank)
            end, shared = rest["end"], rest["shared"] or sources.shared()["shared"]
        else:
            shard, rest = sources.cut_again(tensors, own), sources.shared()
            end, shared = rest["end"], rest["shared"]
        tensors.load([shard], end["options"])
        tensors.load_buffers(end["buffers"])
        self._load_shared(held, shared)
        if recovery.kind is Kind.REPLACED:
            restore_random_state(end["random"])
        self._before = self._volatile(held)
        return held

    def _load_shared(self, held: Held, given: dict[str, Any]) -> None:
        for name, one in {**self._shared, **held.built.others()}.items():
            if name in given:
                one.load_state_dict(given[name])

    def _connect_copies(self, recovery: Recovery, holdings: list[Holding], held: Held) -> None:
        """Connect to the keepers of this rank, and fill those that are new."""
        if self._sender is None or self._sender.tensors is not held.tensors:
            if self._sender is not None:
                self._sender.close()
            whole = not can_replay(held.built.optimizer)
            if whole:
                raise KeepstepError("not implemented")
            self._sender = CopySender(
                held.tensors, whole=whole, token=self._token, timeout=self._timeout.total_seconds()
            )
        at = {(one.replica_id, one.group_rank): one.address for one in holdings}
        world = recovery.world
        fills = {keeper for rank, keeper in recovery.fills if rank == held.rank}
        seat, group_rank = divmod(held.rank, world.ranks_per_seat)
        chosen = {
            at[world.seats[keeper].replica_id, group_rank]: world.rank(keeper, group_rank) in fills
            for keeper in keepers(world, seat, self._copies)
        }
        self._sender.connect(world.number, held.rank, chosen)
        if recovery.kind is Kind.RESIZED:
            self._sender.begin(held.state, self._end)
            self._sender.filled()

    def _adopt(self, held: Held) -> None:
        self._held, self._rebuilt, self._broken = held, None, ""

    def _kept(self, world: World) -> set[tuple[int, int]]:
        """Return the worlds and ranks of which this process keeps copies."""
        own = world.seat_of(self.replica_id)
        return {
            (world.number, world.rank(seat, self._settings.rank))
            for seat in range(len(world.seats))
            if own in keepers(world, seat, self._copies)
        }

    @staticmethod
    def _lost_text(recovery: Recovery) -> str:
        previous = recovery.previous
        assert previous is not None
        seats = sorted({rank // previous.ranks_per_seat for rank in recovery.missing})
        names = ", ".join(previous.seats[one].replica_id for one in seats)
        return (
            f"the shards of {names} are lost at step {recovery.given_up}: each was lost together with its keepers; "
            f"resume from a checkpoint, and use copies=2 to survive this"
        )

    # ---- the end

    def finish(self) -> None:
        """End the training in all ranks together. Call it after the last step."""
        with contextlib.suppress(JobClosed):  # all ranks have asked for it at the same step
            while True:
                self._ready(final=True)
        self._membership.leave("finished", "finished", self.step)
        self.close()

    def close(self) -> None:
        """Free all connections, threads and memory."""
        if self._sender is not None:
            self._sender.close()
        self._server.close()
        if self._meeting is not None:
            self._meeting.close()
        self._groups.shutdown()
        self._membership.close()
