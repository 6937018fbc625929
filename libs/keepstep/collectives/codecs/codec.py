"""The interface of a codec, and the rounds of a job in which it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Work

from keepstep.quantization.row_format import check_floats


@dataclass(frozen=True, slots=True)
class Round:
    """One collective over the groups of a step."""

    process_group: dist.ProcessGroup
    """Over all groups of the quorum."""
    contributes: bool
    """False: this group heals or is a spare. It sends zeros, and gets the result."""
    participants: int
    """Number of groups that contribute, the divisor of an average."""
    timeout: timedelta
    """Of the whole collective."""


class RoundRunner(Protocol):
    """The method of a Manager that codecs use."""

    def run_collective(self, tensors: list[torch.Tensor], start: Callable[[Round], Work]) -> Work: ...


class Codec(ABC):
    """Averages tensors over the groups of a job with fewer bytes than float32.

    The result is equal in all groups bit for bit. All groups must use a codec of the same name.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name with all parameters, for groups to compare."""

    def allreduce(self, manager: RoundRunner, key: str, tensors: list[torch.Tensor]) -> Work:
        """Average tensors in place over the groups that take part in the step.

        Args:
            manager: of this replica group; its step has begun.
            key: name of the tensors, such as that of a fragment. Each key has an error feedback of its own.
            tensors: dense float tensors on one device, of equal shapes in all groups and all rounds of ``key``.

        Returns:
            A Work, as of ``Manager.allreduce``: ``wait`` returns False when the step cannot commit. Call ``settle``
            once it is known whether the round commits.

        Raises:
            ValueError: no tensors, a tensor that is not a dense float tensor, or other shapes than in the last round.
            RuntimeError: no step has begun.
        """
        if not tensors:
            raise ValueError(f"no tensors to average for {key!r}: expected a list of at least one tensor")
        check_floats(tensors)
        return manager.run_collective(tensors, lambda of_step: self._start(of_step, key, tensors))

    @abstractmethod
    def _start(self, of_step: Round, key: str, tensors: list[torch.Tensor]) -> Work:
        """Start the average of ``tensors``."""

    def settle(self, key: str, committed: bool) -> None:  # noqa: B027  a codec without error feedback has none to keep
        """Keep the error feedback of the last round of ``key`` if it was committed, else that of the round before.

        Args:
            key: as in ``allreduce``.
            committed: whether the groups use the result.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that all groups have in common, for a group that heals.

        The errors are not part of it: each group has its own, and two groups with the same would send it twice.
        """
        return {"codec": self.name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another group, and begin without errors: a group that joins has withheld nothing.

        Args:
            state_dict: what ``state_dict`` returned.

        Raises:
            ValueError: it is of another codec.
        """
        if state_dict.get("codec") != self.name:
            raise ValueError(
                f"the state is of codec {state_dict.get('codec')!r}, and this group uses {self.name!r}; use one codec "
                "in all groups"
            )

    def own_state_dict(self) -> dict[str, Any]:
        """Return the state that only this group has, for its own checkpoint: empty without error feedback."""
        return {}

    def load_own_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027  a codec without error feedback has none
        """Load the state of this group from its own checkpoint, after ``load_state_dict``.

        Load it only where all groups go back to the step of the checkpoint. Otherwise the groups have a part of it, and
        would get that twice.

        Args:
            state_dict: what ``own_state_dict`` returned.
        """
