"""DiLoCo: an inner optimizer in each group, and an outer optimizer over the groups, fragment by fragment.

Of arXiv 2311.08105 (DiLoCo), arXiv 2501.18512 (Streaming DiLoCo: fragments, overlap, merging), and arXiv 2604.21428
(Decoupled DiLoCo: groups of different speed).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.collectives.codecs import Quantized
from keepstep.data_parallel.synced_buffers import SyncedBuffers
from keepstep.lifecycle.manager_like import as_manager
from keepstep.local_sgd.buckets import BUCKET_CAP_MB, size_in_bytes
from keepstep.local_sgd.decoupled import Decoupled
from keepstep.local_sgd.fragment import Fragment
from keepstep.local_sgd.layout import (
    check_for_codec,
    optimizer_line,
    order_lines,
    parameter_lines,
    parameters_of_fragments,
)
from keepstep.local_sgd.local_tensors import local_tensor
from keepstep.local_sgd.merged_fragment import MergedFragment
from keepstep.local_sgd.outer_merges import OuterMerges
from keepstep.local_sgd.outer_optimizer import OuterOptimizer
from keepstep.local_sgd.outer_steps import OuterSteps
from keepstep.local_sgd.schedule import Schedule
from keepstep.optim import OptimizerWrapper
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.names import name_of

if TYPE_CHECKING:
    from types import TracebackType

    from keepstep.collectives.codecs import Codec
    from keepstep.manager import Manager

log = get_logger("keepstep.local_sgd")


class DiLoCo(OuterSteps):
    """Trains each group on its own, and steps an outer optimizer with the averaged changes of all groups.

    Use it as a context manager around the training loop::

        manager = Manager(..., use_async_quorum=False)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(manager, [model], adamw, outer, sync_every=500):
            while manager.current_step() < outer_steps:
                adamw.zero_grad()
                loss_fn(model(x), y).backward()
                adamw.step()

    An outer step takes one fragment: the groups average its pseudo-gradient, the parameters after the last outer step
    minus the parameters now, and the outer optimizer steps the former with it. One outer step ends every ``sync_every /
    len(model_fragments)`` inner steps, and the fragments take turns. It is one step of the Manager. If it does not
    commit, the fragment goes back to its parameters after its last outer step, and the next outer step takes the same
    fragment again.

    The parameters after the last outer step and the state of the outer optimizer heal as
    ``StreamingDiLoCoFragment_<i>``. Register the model and the inner optimizer with the Manager. A group that joins
    loads both from another group, and trains on as that group would.

    Args:
        manager: of this replica group, with ``use_async_quorum=False``. One Manager takes one DiLoCo.
        model_fragments: modules of the model, which together have all its trained parameters. Parameters that are
            DTensors are synchronized shard by shard.
        inner_optimizer: of torch, not a ``keepstep.Optimizer``. Its steps are counted; steps that a GradScaler skips
            are not.
        outer_optimizer: of all fragments, or a list with one for each. A scheduler of it steps when
            ``manager.current_step()`` has grown.
        sync_every: inner steps in which every fragment is synchronized once; a multiple of the number of fragments.
        backup_device: of the parameters after the last outer step; None: the CPU.
        pin_memory: keep them in pinned memory, if they are on the CPU and the parameters on CUDA.
        use_bucketization: reduce several parameters together. The result is the same.
        bucket_cap_mb: size of a bucket in MiB; None: 32.
        should_quantize: average 8-bit values; the same as ``codec=Quantized()``.
        fragment_sync_delay: inner steps between the begin of the all-reduce and the outer step, during which the groups
            train on; below ``sync_every / len(model_fragments)``.
        fragment_update_alpha: weight in [0, 1] of a group's own parameters in the mean with the result of the outer
            step; 0: the parameters become the result.
        sync_buffers: average or copy the buffers of a fragment with its outer step, as in ``DistributedDataParallel``.
        codec: of ``keepstep.collectives.codecs``, for averages with fewer bytes; None: full precision. With ``TopK``
            or ``TwoBit`` use an outer optimizer without momentum, such as ``torch.optim.SGD(parameters, lr=1.0)``.
        decoupled: settings with which no group waits for a slower one; None: each outer step waits for all groups.
            Only without ``fragment_sync_delay`` and ``fragment_update_alpha``.

    Raises:
        ValueError: an argument is out of range, the Manager has an asynchronous quorum, a trained parameter is in no
            fragment or in two, or a parameter or buffer cannot be synchronized.
        TypeError: an optimizer is a ``keepstep.Optimizer`` or one of Accelerate, or a fragment is wrapped in a
            ``keepstep.DistributedDataParallel``.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: list[nn.Module],
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer | list[Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: int | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        *,
        sync_buffers: bool = True,
        codec: Codec | None = None,
        decoupled: Decoupled | None = None,
    ) -> None:
        manager = as_manager(manager)
        if manager.use_async_quorum:
            raise ValueError(
                "DiLoCo needs a synchronous quorum, in which a group heals before it computes its pseudo-gradient: "
                "pass use_async_quorum=False to the Manager"
            )
        if should_quantize and codec is not None:
            raise ValueError(f"should_quantize=True and codec={codec.name} are two ways to reduce; pass one of them")
        self._codec = Quantized() if should_quantize else codec
        if not 0 <= fragment_update_alpha <= 1:
            raise ValueError(f"fragment_update_alpha={fragment_update_alpha} must be in [0, 1]")
        if decoupled is not None and (fragment_sync_delay or fragment_update_alpha):
            raise ValueError(
                f"fragment_sync_delay={fragment_sync_delay} and fragment_update_alpha={fragment_update_alpha} must be "
                f"0 in decoupled groups, which train while an outer step waits and keep what they trained"
            )
        schedule = Schedule(sync_every, len(model_fragments), fragment_sync_delay)
        outers = _one_each(outer_optimizer, inner_optimizer, len(model_fragments))
        parameters = parameters_of_fragments(model_fragments, inner_optimizer, outers)
        if self._codec is not None:
            check_for_codec(self._codec, parameters, outers)
        buffers = [
            SyncedBuffers(manager, module, sync=sync_buffers, average=(), ignore=()) for module in model_fragments
        ]
        cap = size_in_bytes(BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) if use_bucketization else None
        keys = [f"StreamingDiLoCoFragment_{number}" for number in range(len(model_fragments))]
        everything = [one for fragment in parameters for one in fragment.values()]
        if decoupled is not None:
            manager.background.use(decoupled.min_groups, decoupled.grace)
        super().__init__(manager, inner_optimizer, everything, schedule, frozenset(keys))
        self._fragments = [
            (Fragment if decoupled is None else MergedFragment)(
                *(manager, parameters[number], buffers[number], OuterOptimizer(outer, [*parameters[number].values()])),
                backup_device=torch.device(backup_device or "cpu"),
                pin_memory=pin_memory,
                bucket_bytes=cap,
                alpha=fragment_update_alpha,
                codec=self._codec,
                key=keys[number],
            )
            for number, outer in enumerate(outers)
        ]
        merged = [one for one in self._fragments if isinstance(one, MergedFragment)]
        device = local_tensor(everything[0]).device
        self._merges = None if decoupled is None else OuterMerges(manager, decoupled, merged, schedule.period, device)
        for key, fragment in zip(keys, self._fragments, strict=True):
            manager.register_state_dict_fn(key, fragment.load_state_dict, fragment.state_dict)
        lines = [
            f"DiLoCo sync_every {sync_every}",
            f"fragments {len(model_fragments)}",
            f"fragment_sync_delay {fragment_sync_delay}",
            f"fragment_update_alpha {fragment_update_alpha}",
            f"buckets of {cap} bytes" if cap else "no buckets",
            f"codec {self._codec.name if self._codec else 'none'}",
        ]
        lines += [decoupled.line] if decoupled is not None else []
        for number, outer in enumerate(outers):
            lines += [optimizer_line(number, outer), *parameter_lines(parameters[number], f"fragment {number} ")]
            lines += buffers[number].lines
        trained = {f"fragment {n} {name}": one for n, named in enumerate(parameters) for name, one in named.items()}
        manager.steps.add_layout([*lines, *order_lines(inner_optimizer, trained)])
        for outer in dict.fromkeys(outers) if decoupled is None else ():  # decoupled groups step them at other times
            manager.script_checker.common.add_optimizer(outer, trained)

    def count_tokens(self, tokens: float) -> None:
        """Count what this group trains on. Decoupled groups weigh their contributions by it.

        Args:
            tokens: number of tokens or samples of an inner step, over all ranks of the group; equal in its ranks. Call
                this before the step of the inner optimizer.

        Raises:
            RuntimeError: this DiLoCo is not made with ``Decoupled(weight_by="tokens")``.
            ValueError: the number is negative or not finite.
        """
        if self._merges is None:
            raise RuntimeError("contributions have equal weights: pass decoupled=Decoupled(weight_by='tokens')")
        self._merges.count_tokens(tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the user's own checkpoint, besides model, inner optimizer, and Manager.

        Returns:
            The position in the period, the outer optimizer and parameters of each fragment, and the error feedback of
            the codec with the name of this group. An outer step that has begun is not in it.
        """
        state = {**self._position(), "fragments": [fragment.state_dict() for fragment in self._fragments]}
        if self._codec is not None:
            state["own"] = {"group": self._group(), "codec": self._codec.own_state_dict()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. Do so in all groups, outside of the block.

        Every group may load the state of one group. Its error feedback is loaded only by the group of the same name:
        in another group it would be sent a second time.

        Args:
            state_dict: of this group or another one.

        Raises:
            RuntimeError: an outer step has begun.
            ValueError: the state has other fragments or another codec. Then nothing is loaded.
        """
        if self._schedule.in_flight is not None:
            raise RuntimeError("an outer step has begun: load the state before the block is entered")
        saved = state_dict["fragments"]
        if len(saved) != len(self._fragments):
            raise ValueError(f"the state has {len(saved)} fragments, and this DiLoCo {len(self._fragments)}")
        for fragment, state in zip(self._fragments, saved, strict=True):
            fragment.check(state)
        self._load_position(state_dict)
        for fragment, state in zip(self._fragments, saved, strict=True):
            fragment.load_state_dict(state)
        own = state_dict.get("own", {})
        if self._codec is not None and own.get("group") == self._group():
            self._codec.load_own_state_dict(own["codec"])
        elif self._codec is not None:
            log.info("begin without error feedback", group=self._group(), loaded_from=own.get("group"))

    def _group(self) -> str:
        """Return the name of this group, which it keeps when it starts again."""
        return name_of(self._manager.replica_id())

    def _position(self) -> dict[str, Any]:
        codec = {"codec": self._codec.state_dict()} if self._codec else {}
        weights = {"weights": self._merges.weights} if self._merges is not None else {}
        return super()._position() | codec | weights

    def _load_position(self, state: dict[str, Any]) -> None:
        if self._codec is not None:
            self._codec.load_state_dict(state.get("codec", {}))
        super()._load_position(state)
        if self._merges is not None:
            self._merges.load_weights(state.get("weights", [0.0] * len(self._fragments)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop counting. An outer step that other groups wait for ends now, unless an exception leaves the block."""
        super().__exit__(kind, error, trace)
        if self._merges is not None:
            if error is None and self._manager.background.formed():
                self._merge()
            else:
                self._manager.background.withdraw()

    def _count_step(self) -> None:
        super()._count_step()
        if self._merges is not None:
            self._merges.count_step()

    def _advance(self) -> None:
        if self._merges is None:
            super()._advance()
        elif self._schedule.begins and self._merges.is_due(self._schedule.position):
            self._merge()

    def _merge(self) -> None:
        assert self._merges is not None
        self._start_quorum()
        before, committed = self._manager.current_step(), False
        try:
            committed = self._merges.merge()
        finally:
            if committed or self._manager.current_step() != before:  # the merge may end with an exception after it
                self._schedule.end()

    def _start_quorum(self) -> None:
        super()._start_quorum()
        if self._merges is not None and self._sources:
            self._merges.start_over()

    def _start(self, fragment: int) -> None:
        self._fragments[fragment].begin()

    def _finish(self, fragment: int) -> bool:
        return self._fragments[fragment].end()

    def _abandon(self, fragment: int) -> None:
        self._fragments[fragment].settle(committed=False)


def _one_each(outer: Optimizer | Sequence[Optimizer], inner: Optimizer, fragments: int) -> list[Optimizer]:
    """Return an outer optimizer for each fragment."""
    outers = [outer] * fragments if isinstance(outer, Optimizer) else list(outer)
    if len(outers) != fragments:
        raise ValueError(
            f"{len(outers)} outer optimizers for {fragments} fragments: pass one of all fragments, or one for each"
        )
    if any(isinstance(one, OptimizerWrapper) for one in outers):
        raise TypeError("an outer optimizer is a keepstep.Optimizer, which commits: pass the optimizer inside it")
    if any(one is inner for one in outers):
        raise ValueError("the inner optimizer is an outer optimizer too; build an optimizer of its own for each")
    return outers
