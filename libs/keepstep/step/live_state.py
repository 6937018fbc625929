"""The live state: the user's named parts and the Manager's own. On the training thread only.

A snapshot during a forward pass would be torn, and FSDP's ``state_dict`` is collective. So the state is read and loaded
only when the training thread is between two passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from keepstep.checkpointing.transport import CheckpointTransport
from keepstep.state.errors import StateMismatch, StatesMissing
from keepstep.state.exact_load import differences, put_back, with_own_containers
from keepstep.state.state_bytes import state_root
from keepstep.transfer.exchange import Progress
from keepstep_mesh.config.logging import Logger, get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.membership import Lineage, StateRoot
from keepstep_mesh.text import listed

HOW_TO_RESTORE = (
    "this group trains apart from the source if they decide the weights: let load_state_dict load everything that "
    "state_dict returns, without a cast, and return no values that differ between groups"
)


@dataclass(frozen=True, slots=True)
class _Part:
    load: Callable[[Any], None]
    save: Callable[[], Any]


class LiveState:
    """Named parts of a group's state.

    Args:
        save_manager: returns the Manager's own part.
        load_manager: loads it.
        log: names the group.
    """

    def __init__(
        self,
        save_manager: Callable[[], dict[str, Any]],
        load_manager: Callable[[dict[str, Any]], None],
        log: Logger | None = None,
    ) -> None:
        self._log = log or get_logger("keepstep.manager")
        self._parts: dict[str, _Part] = {}
        self._save_manager = save_manager
        self._load_manager = load_manager
        self.compared: frozenset[str] | None = None
        """The parts that are equal in all groups between two steps; None: all."""
        self.readable = True
        """False: the state is in the middle of a change, and reading it is an error."""
        self.loads = 0
        """Number of states that were loaded into the parts."""
        self.reading = False
        """Whether the parts are being read here, and not by the script."""
        self.refreshed: list[Callable[[], object]] = []
        """Called before the parts are read, for those that a script keeps apart from the live state."""
        self.settle: Callable[[], None] = lambda: None
        """Called before the state is loaded, to wait for what is still copied from it."""

    def register(self, key: str, load: Callable[[Any], None], save: Callable[[], Any], replace: bool = False) -> None:
        """Add a part. ValueError if ``key`` is registered already and ``replace`` is False."""
        if key in self._parts and not replace:
            raise ValueError(f"a state is registered as {key!r} already; give each part a key of its own")
        self._parts[key] = _Part(load, save)

    @property
    def registered(self) -> bool:
        """Whether the script has registered a part."""
        return bool(self._parts)

    def user_state(self, keys: frozenset[str] | None = None) -> dict[str, Any]:
        """Return the registered parts by their keys; ``keys``: only these."""
        before, self.reading = self.reading, True
        try:
            for refresh in self.refreshed:
                refresh()
            return {key: part.save() for key, part in self._parts.items() if keys is None or key in keys}
        finally:
            self.reading = before

    def snapshot(self) -> dict[str, Any]:
        """Return the state for a durable checkpoint: the tensors of this group, not copies.

        Raises:
            KeepstepError: the state is not readable.
        """
        self._check_readable("a durable checkpoint is due")
        return self._save()

    def stage(
        self, transport: CheckpointTransport[dict[str, Any]], destinations: list[int], step: int, timeout: timedelta
    ) -> None:
        """Hand a snapshot of the state to ``transport``. Return when the snapshot is made."""
        self._check_readable("another group has to heal from this one")
        transport.send_checkpoint(destinations, step, self._save(), timeout)

    def root(self) -> bytes:
        """Compute the root digest of the parts that are compared, without a copy of them.

        Raises:
            KeepstepError: the state is not readable, or a key of ``compared`` is not registered.
        """
        self._check_readable("the lighthouse compares the states of all groups")
        if unknown := (self.compared or frozenset()) - self._parts.keys():
            raise KeepstepError(
                f"compare_only() has {sorted(unknown)}, and the registered states are {sorted(self._parts)}; give the "
                f"keys of registered states"
            )
        return state_root(self._save(self.compared))

    def root_at(self, step: int, lineage: Lineage) -> StateRoot | None:
        """Return the root digest of the state of (``step``, ``lineage``); None: nothing is compared, or an error.

        Call it in every rank, also after an error, because FSDP's ``state_dict`` is collective.
        """
        if self.compared == frozenset():
            return None
        try:
            return StateRoot(step, lineage, self.root().hex())
        except Exception as error:  # noqa: BLE001  the step itself is not affected
            reason = f"{type(error).__name__}: {error}"
            self._log.error("state not compared with the other groups", step=step, reason=reason)
            return None

    def _check_readable(self, occasion: str) -> None:
        if not self.readable:
            raise KeepstepError(
                f"{occasion}, but disallow_state_dict_read() is in force; call allow_state_dict_read() first"
            )

    def _save(self, keys: frozenset[str] | None = None) -> dict[str, Any]:
        return {"user": self.user_state(keys), "manager": self._save_manager()}

    def receive(
        self,
        transport: CheckpointTransport[dict[str, Any]],
        source: int,
        metadata: str,
        step: int,
        timeout: timedelta,
        progress: Progress,
        limit: timedelta | None = None,
    ) -> None:
        """Receive and load the state of another group, into this group's own tensors where they fit.

        Args:
            transport: receives the state.
            source: replica_rank of the group that sends it.
            metadata: of its transport.
            step: of the state.
            timeout: limit of a receive without progress.
            progress: called with the bytes received so far and in all.
            limit: of the whole receive; None: none.

        Raises:
            StateMismatch: the state does not fit this group, or one of its functions that load it raised an error.
            TransferError, TimeoutError: the state was not received.
        """
        self.settle()
        if getattr(transport, "accepts_into", False):
            state = transport.recv_checkpoint(
                source, metadata, step, timeout, into=self._save(), progress=progress, limit=limit
            )
        else:  # written for torchft, perhaps without our base class
            state = transport.recv_checkpoint(source, metadata, step, timeout)
        loaded = self.load_user_state(state["user"])
        self._load_manager(state["manager"])
        self.check_loaded(loaded)

    def load_user_state(self, user: dict[str, Any]) -> dict[str, Any]:
        """Load every registered part.

        Args:
            user: what ``user_state`` returned in another process.

        Returns:
            The same, for ``check_loaded``, also where a function that loads a part has changed it.

        Raises:
            StatesMissing: this group does not have all parts.
            StateMismatch: the parts differ otherwise, or one of the functions of this group raised an error.
        """
        self.settle()
        if user.keys() != self._parts.keys():
            kind = StatesMissing if self._parts.keys() < user.keys() else StateMismatch
            raise kind(
                f"the source has the states {sorted(user)}, this group {sorted(self._parts)}; register the same keys "
                f"in every group, before the first start_quorum() or at the same manager.current_step()",
                torn=True,
            )
        self.loads += 1
        loaded: dict[str, Any] = with_own_containers(user)
        for key, value in user.items():
            try:
                self._parts[key].load(value)
            except (MemoryError, torch.OutOfMemoryError):  # memory may be free again later
                raise
            except Exception as error:
                self._log.error("load_state_dict failed", key=key, exc_info=error)
                what = f"load_state_dict of {key!r} failed: {type(error).__name__}: {error}"
                raise StateMismatch(what, torn=True) from error
        return loaded

    def check_loaded(self, user: dict[str, Any]) -> None:
        """Put back the values that torch cast in a load, and log those that this group does not hold after it.

        Call it when step and batches of the Manager are those of the state, which parts may depend on.

        Args:
            user: what ``load_user_state`` has returned.
        """
        try:
            held = self.user_state()
            for key, loaded in user.items():
                if put_back(loaded, held[key]):
                    held |= self.user_state(frozenset({key}))  # it may have returned a copy
            compared = user.keys() if self.compared is None else user.keys() & self.compared  # others may differ
            lost = [path for key in sorted(compared) for path in differences(user[key], held[key], key)]
        except Exception as error:  # noqa: BLE001  the state is loaded, and the groups compare their weights later
            self._log.warning("loaded state not compared", reason=f"{type(error).__name__}: {error}")
            return
        if lost:
            what = f"{len(lost)} values of the registered state differ from those that were loaded: {listed(lost, 3)}"
            self._log.error("state not restored", reason=what, remedy=HOW_TO_RESTORE)
