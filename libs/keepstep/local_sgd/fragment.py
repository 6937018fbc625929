"""One fragment of a model under DiLoCo: its outer step, and its state.

A fragment's *originals* are its parameters after its last outer step. They are equal in all groups; the parameters
themselves differ while the groups train.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import Work

from keepstep.data_parallel.synced_buffers import SyncedBuffers
from keepstep.local_sgd.buckets import allocate
from keepstep.local_sgd.local_tensors import extract_local_tensor, local_tensor
from keepstep.local_sgd.outer_optimizer import OuterOptimizer
from keepstep_mesh.text import listed

if TYPE_CHECKING:
    from keepstep.collectives.codecs import Codec
    from keepstep.manager import Manager

MAX_NAMED = 3
"""Parameters that an error names."""


class Fragment:
    """The parameters of one fragment, and copies of them as they were after the last outer step.

    Args:
        manager: of this replica group.
        parameters: the trained parameters, by name.
        buffers: of the fragment's module.
        outer_optimizer: changes the originals.
        backup_device: of the originals.
        pin_memory: keep originals on the CPU in pinned memory, if their parameters are on CUDA.
        bucket_bytes: size of a bucket; None: an all-reduce for each parameter.
        alpha: weight of the local parameters when the result is merged into them.
        codec: of the average; None: full precision.
        key: name of this fragment, for the codec.
    """

    def __init__(
        self,
        manager: Manager,
        parameters: Mapping[str, nn.Parameter],
        buffers: SyncedBuffers,
        outer_optimizer: OuterOptimizer,
        *,
        backup_device: torch.device,
        pin_memory: bool,
        bucket_bytes: int | None,
        alpha: float,
        codec: Codec | None,
        key: str,
    ) -> None:
        self._manager = manager
        self._parameters = dict(parameters)
        self._buffers = buffers
        self._outer_optimizer = outer_optimizer
        self._bucket_bytes = bucket_bytes
        self._alpha = alpha
        self._codec = codec
        self._key = key
        pinned = pin_memory and backup_device.type == "cpu"
        self.originals = {
            name: _backup(local_tensor(parameter), backup_device, pinned=pinned and parameter.is_cuda)
            for name, parameter in self._parameters.items()
        }
        self._works: list[Work] = []
        self._pseudo_gradients: list[torch.Tensor] = []
        """Views into the tensors that are reduced, one for each parameter."""

    @property
    def trained_from(self) -> list[torch.Tensor]:
        """The parameters that the group began to train from, and that its pseudo-gradients are relative to."""
        return list(self.originals.values())

    @torch.no_grad()
    def begin(self, share: float = 1.0) -> None:
        """Start to average the pseudo-gradients, ``original - parameter``, over the groups.

        Args:
            share: factor of this group's pseudo-gradients.
        """
        local = [local_tensor(parameter) for parameter in self._parameters.values()]
        reduced, self._pseudo_gradients = allocate(local, self._bucket_bytes)
        for gradient, original, now in zip(self._pseudo_gradients, self.trained_from, local, strict=True):
            gradient.copy_(original, non_blocking=True).sub_(now)
            if not share:
                gradient.zero_()  # also of a NaN
            elif share != 1:
                gradient.mul_(share)
        self._buffers.start()
        if self._codec is None:
            self._works = [self._manager.allreduce(one) for one in reduced]
        elif reduced:
            self._works = [self._codec.allreduce(self._manager, self._key, reduced)]

    def end(self) -> bool:
        """Wait for the average, and commit. Return whether the outer step committed.

        If it did, the outer optimizer steps the originals, and the parameters become a mean of the result and the local
        parameters. Otherwise the parameters become the originals.
        """
        committed = False
        try:
            self.wait()
            trained = [extract_local_tensor(one) for one in self._parameters.values()] if self._alpha else []
            self._restore()
            with self._manager.committing() as committed:
                if committed:
                    self._outer_optimizer.step(self._pseudo_gradients)
                    self._keep_originals()
                    self._merge(trained)
        finally:
            self.settle(committed=committed)
        return committed

    def wait(self) -> None:
        """Wait for the average."""
        for work in self._works:
            work.wait()

    def settle(self, *, committed: bool) -> None:
        """Forget the outer step that has begun, and free its memory. ``committed``: whether its result is used."""
        if self._codec is not None:
            self._codec.settle(self._key, committed)
        self._works, self._pseudo_gradients = [], []

    @torch.no_grad()
    def _restore(self) -> None:
        for name, parameter in self._parameters.items():
            local_tensor(parameter).copy_(self.originals[name], non_blocking=True)

    @torch.no_grad()
    def _keep_originals(self) -> None:
        for name, parameter in self._parameters.items():
            self.originals[name].copy_(local_tensor(parameter))

    @torch.no_grad()
    def _merge(self, trained: Sequence[torch.Tensor]) -> None:
        if trained:
            for parameter, own in zip(self._parameters.values(), trained, strict=True):
                local_tensor(parameter).lerp_(own, self._alpha)

    def state_dict(self) -> dict[str, Any]:
        """Return the outer optimizer's state and the originals."""
        return {"outer_optimizer": self._outer_optimizer.state_dict(), "original_parameters": dict(self.originals)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. ValueError as of ``check``."""
        self.check(state_dict)
        self._outer_optimizer.load_state_dict(state_dict["outer_optimizer"])
        for name, original in self.originals.items():
            original.copy_(state_dict["original_parameters"][name])

    def check(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError if the parameters of ``state_dict`` have other names or shapes."""
        saved = state_dict["original_parameters"]
        if saved.keys() != self.originals.keys():
            raise ValueError(
                f"the state has the parameters {listed(list(saved), MAX_NAMED)}, and this fragment "
                f"{listed(list(self.originals), MAX_NAMED)}: load a state of the same model_fragments"
            )
        for name, original in self.originals.items():
            if saved[name].shape != original.shape:
                raise ValueError(
                    f"parameter {name!r} of the state has shape {tuple(saved[name].shape)}, and that of this fragment "
                    f"{tuple(original.shape)}: load a state of the same model_fragments"
                )


def _backup(tensor: torch.Tensor, device: torch.device, *, pinned: bool) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned)
    return copy.copy_(tensor)
