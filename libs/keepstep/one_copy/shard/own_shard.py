"""The shard of this rank, and the end of its steps: applied, dropped, or brought to the target of a recovery."""

from __future__ import annotations

import array
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from keepstep.one_copy.copies.kept_bytes import Memory, Stored
from keepstep.one_copy.copies.rank_state import RankState
from keepstep.one_copy.copies.replay import can_replay
from keepstep.one_copy.core.holding import State
from keepstep.one_copy.core.world import World
from keepstep.one_copy.shard.built import Built, Stateful, end_broken_pass
from keepstep.runtime.devices import device_types, generators
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError

log = get_logger("keepstep.one_copy")


@dataclass
class Held:
    """A shard of this rank."""

    world: World
    rank: int
    """In ``world``."""
    state: State
    built: Built
    tensors: RankState

    def end(self, *, skipped: bool = False) -> dict[str, Any]:
        """Return what a keeper needs beside slices: options, buffers, random state, whether the optimizer steps.

        Args:
            skipped: a ``GradScaler`` has found an overflow: the optimizer does not step.
        """
        return {
            "options": self.tensors.options(),
            "buffers": self.tensors.buffers(),
            "random": random_state(),
            "skipped": skipped,
        }


class OwnShard:
    """The shard of this rank, and perhaps a second one, of a world that is not known to be whole.

    An optimizer that cannot be replayed steps before the vote, because keepers need the state after the step. The bytes
    that went to them before are the way back.
    """

    def __init__(self) -> None:
        self.held: Held | None = None
        self.rebuilt: Held | None = None
        """Of a later world, for which this rank has voted."""
        self.voted = 0
        """quorum_id in which it voted for the next step, whose gradients it still has; 0: none."""
        self.whole = True
        """Whether the script has gone through its step to the end, so that its states fit that of the shard."""
        self.optimizer_class: type[torch.optim.Optimizer] | None = None
        self.registered: dict[str, Stateful] = {}
        self._before: dict[str, Any] = {}
        """Buffers at the last commit, and random state before the passes."""
        self._skipped = False
        self._scaler: GradScaler | None = None
        self.torn = False
        """Whether a step of the optimizer has begun and not ended, so that the shard is of no state."""
        self._stepped = False
        """Whether the optimizer has stepped in a step that is not known to be committed."""
        self._way_back: list[Stored] = []
        self._memory = Memory()
        """Of ``_way_back``."""
        self._options: list[dict[str, Any]] = []
        self._stepping = False
        """Whether this object steps the optimizer, and not the script."""

    def now(self) -> Held:
        """Return the shard. RuntimeError: the job has not begun."""
        if self.held is None:
            raise RuntimeError("the job has not begun: the first attempt() builds the model")
        return self.held

    def take(self, held: Held) -> None:
        """Let a shard be that of this rank."""
        self.held, self.rebuilt = held, None

    @property
    def replayed(self) -> bool:
        """Whether keepers can repeat steps of the optimizer."""
        return can_replay(self.now().built.optimizer)

    def replays(self, held: Held) -> bool:
        """Return whether keepers can repeat steps of the optimizer; say once if they cannot."""
        kind = type(held.built.optimizer)
        if not can_replay(held.built.optimizer) and kind is not self.optimizer_class:
            log.info("optimizer cannot be replayed: keepers get its whole state in each step", optimizer=kind.__name__)
        self.optimizer_class = kind
        return can_replay(held.built.optimizer)

    def others(self, built: Built) -> dict[str, Stateful]:
        """Return the states beside model and optimizer, which all ranks have in common."""
        return {**self.registered, **built.others()}

    # ---- a step

    def begin(self) -> None:
        """Note what the passes of a step change, before the first attempt of it."""
        self._before["random"] = random_state()

    def unscale(self, scaler: GradScaler | None, any_of: Callable[[bool], bool]) -> None:
        """Unscale the gradients, and agree on whether the optimizer steps.

        Args:
            scaler: None: the gradients are not scaled.
            any_of: returns whether any rank has an overflow.
        """
        self._scaler, self._skipped = scaler, False
        if scaler is None or not scaler.is_enabled():
            return
        optimizer = self.now().built.optimizer
        state = scaler._per_optimizer_states[id(optimizer)]  # noqa: SLF001  torch has no public way to agree on it
        if not state["found_inf_per_device"]:
            scaler.unscale_(optimizer)
        found = state["found_inf_per_device"]
        self._skipped = any_of(any(bool(one.item()) for one in found.values()))
        device = torch.device(scaler._device)  # noqa: SLF001
        state["found_inf_per_device"] = {device: torch.full((), float(self._skipped), device=device)}

    def end(self) -> dict[str, Any]:
        """Return the end of this step, for keepers. Call it before ``step_ahead``."""
        return self.now().end(skipped=self._skipped)

    def step_ahead(self) -> None:
        """Let an optimizer step that cannot be replayed, so that keepers get the state after the step."""
        if self.replayed:
            return
        held = self.now()
        tensors, optimizer = held.tensors, held.built.optimizer
        self._way_back = [Stored.of(tensors.base(number), self._memory) for number in range(len(tensors.slices))]
        self._options = tensors.options()
        self._stepped = True
        self._step(optimizer)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepping = True
        try:
            if not self._skipped:
                optimizer.step()
        finally:
            self._stepping = False

    def refuse_step(self, *_: object) -> None:
        """Refuse a step that the script takes by itself: no keeper knows of it. Called before each step."""
        if not self._stepping:
            raise KeepstepError(
                "commit() steps the optimizer: remove optimizer.step() and scaler.step() from the script"
            )

    def apply(self, following: State) -> None:
        """Take the step that was committed."""
        held = self.now()
        optimizer = held.built.optimizer
        self.torn = True
        if self.replayed:
            self._step(optimizer)
        self._stepped = False
        self._way_back = []
        if self._scaler is not None and self._scaler.is_enabled():
            self._scaler.update()
        optimizer.zero_grad()
        for one in held.built.schedulers:
            one.step()
        held.state, self.voted, self.whole, self.torn = following, 0, True, False
        self._before.pop("random", None)  # what follows is not a part of this step
        self.note_buffers(held)

    def drop(self) -> None:
        """Undo what the passes and the optimizer have changed in a step that is not committed."""
        held = self.now()
        self.voted = 0
        held.built.optimizer.zero_grad()
        if self._stepped:
            held.tensors.load((one.state() for one in self._way_back), self._options, given_away=True)
            self._stepped = False
            self._way_back = []
        for scaler in (self._scaler, *self.others(held.built).values()):
            if isinstance(scaler, GradScaler) and scaler.is_enabled() and scaler._per_optimizer_states:  # noqa: SLF001
                scaler.update(new_scale=scaler.get_scale())
        held.tensors.load_buffers(self._before.get("buffers", {}))
        self.restart_random()

    def note_buffers(self, held: Held) -> None:
        """Note the buffers of a state that is committed."""
        self._before["buffers"] = {name: one.clone() for name, one in held.tensors.buffers().items()}

    def continue_random(self, state: dict[str, Any]) -> None:
        """Set the random numbers to those of the rank whose place this one takes."""
        restore_random_state(state)
        self._before.pop("random", None)

    def restart_random(self) -> None:
        """Set the random numbers back to those before the passes."""
        if "random" in self._before:
            restore_random_state(self._before["random"])

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank, in their memory."""
        tensors = self.now().tensors
        return [one for number in range(len(tensors.slices)) for one in tensors.gradients(number).values()]

    def finite(self) -> bool:
        """Return whether all gradients are finite."""
        gradients = self.gradients()
        return not gradients or bool(torch.stack([torch.isfinite(one).all() for one in gradients]).all())

    # ---- a recovery

    def settle(self, target: State, *, forward: bool, build: Callable[[], Built] | None) -> None:
        """Bring the shard to the target of a recovery, and make its model usable again.

        Args:
            target: the state of the shard, or with ``forward`` the state after it.
            forward: apply the gradients of the step that this rank has voted for.
            build: builds another model, if the passes of this one cannot be ended; None: another one replaces it.
        """
        held = self.now()
        if forward:
            self.apply(target)
        else:
            self.drop()
        if build is not None and not end_broken_pass(held.built.model):
            self._build_again(held, build())
        if forward:
            held.tensors.load_buffers(self._before["buffers"])

    def _build_again(self, held: Held, built: Built) -> None:
        """Put the shard into a new model."""
        old, others = held.tensors, {name: one.state_dict() for name, one in held.built.others().items()}
        held.built, held.tensors = built, RankState(built.model, built.optimizer)
        held.tensors.load((old.base(number) for number in range(len(old.slices))), old.options())
        held.tensors.load_buffers(old.buffers())
        self.load_others(held, others)

    def load_others(self, held: Held, given: dict[str, Any]) -> None:
        """Load states that all ranks have in common."""
        for name, one in self.others(held.built).items():
            if name in given:
                one.load_state_dict(given[name])


def random_state() -> dict[str, Any]:
    """Return the state of the generators of this process."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, array.array("Q", words).tobytes(), gauss],
    }
    found |= {kind: generators(kind).get_rng_state() for kind in device_types()[1:]}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        if name == "MT19937":
            found["numpy"] = [keys.tobytes(), int(position), int(has_gauss), float(cached)]
    return found


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators of this process."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    numbers = array.array("Q")
    numbers.frombytes(words)
    random.setstate((version, tuple(numbers), gauss))
    for kind in {"cuda", "xpu"} & state.keys():
        if (module := generators(kind)) is not None:
            module.set_rng_state(state[kind])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state(("MT19937", numpy.frombuffer(keys, dtype="uint32"), position, has_gauss, cached))
