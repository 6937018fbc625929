"""Connections over which ranks of a job with one copy send their copies, and the keeper at their end.

It does with symbols what ``copies.copy_server`` and ``copies.keeper`` do with bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keepstep.one_copy.core.holding import State
from tests.simulation.virtual.network import FIN, Connection
from tests.support.models.symbolic_copies import KeptCopy, Key, Message

if TYPE_CHECKING:
    from tests.simulation.actors.trainer import Trainer

OWN, BEGUN, REFUSED = object(), object(), object()
"""Frames of a connection to a keeper, beside copies and confirmed states."""


class CopyLink:
    """The connection of a rank to a keeper, over which it sends its copies."""

    def __init__(self, owner: Trainer, keeper: Trainer, key: Key, quorum_id: int, *, fill: bool) -> None:
        self.owner, self.keeper = owner, keeper
        self.key, self.quorum_id, self.fill = key, quorum_id, fill
        self.begun = False
        self.confirmed: list[State] = []
        self.connection = owner.sim.mesh.connect(owner.member.name, self, keeper.member.name, KeeperEnd(self))

    def receive(self, _: Connection, message: Any) -> None:
        self.owner.member.act(self.owner.copies_answered, (self, message))


class KeeperEnd:
    """The other end."""

    def __init__(self, link: CopyLink) -> None:
        self.link = link

    def receive(self, _: Connection, message: Any) -> None:
        keeper = self.link.keeper
        if not keeper.gone:
            keeper.member.act(keeper.keeper.take, (self, message))

    def answer(self, message: Any) -> None:
        self.link.connection.send(self, message)


class CopyKeeper:
    """The copies that a rank keeps. They are in its ``model``."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._kept_for: dict[Key, int] = {}
        """quorum_id of the owner of each copy."""
        self._open: list[KeeperEnd] = []

    def take(self, end: KeeperEnd, message: Any) -> None:
        """A frame of an owner."""
        link = end.link
        if message is FIN:
            self._open = [one for one in self._open if one is not end]
        elif message is OWN:
            self._open.append(end)
            end.answer(self._begin_copy(link))
        elif self._kept_for.get(link.key) != link.quorum_id:
            self._refuse(end)
        elif end in self._open:
            self._keep(link.key, message)
            if message.part == "end":
                end.answer(message.state)

    def _refuse(self, end: KeeperEnd) -> None:
        end.answer(REFUSED)
        end.link.connection.close(end)

    def _begin_copy(self, link: CopyLink) -> object:
        key, model = link.key, self._trainer.model
        if self._kept_for.get(key, 0) > link.quorum_id:
            return REFUSED
        if link.fill and self._trainer.member.full:
            if key in self._kept_for:
                self._kept_for[key] = link.quorum_id
            return REFUSED
        filling = {one: copy for one, copy in model.filling.items() if one != key}
        if link.fill:
            filling[key] = KeptCopy(*key, self._trainer.shards.slices)
        elif key not in model.copies:
            self._trainer.sim.violated(f"{self._trainer.member.replica_id} has no base of {key}, and gets none")
        self._kept_for[key] = link.quorum_id
        self._trainer.model = replace(model, filling=filling)
        return BEGUN

    def _keep(self, key: Key, message: Message) -> None:
        model = self._trainer.model
        filling = key in model.filling
        copy = (model.filling if filling else model.copies)[key].copied()
        copy.take(message)
        complete = not filling or (message.part == "end" and copy.ledger.complete)
        self._trainer.model = model.with_copy(key, copy, complete=complete)
        self._trainer.shards.check_size(copy)

    def forget(self, kept: set[Key]) -> None:
        """Forget the owners of other copies."""
        self._kept_for = {key: one for key, one in self._kept_for.items() if key in kept}

    def end_before(self, quorum_id: int | None) -> None:
        """Close the connections of owners that took their place in an earlier quorum; None: all."""
        for end in [one for one in self._open if quorum_id is None or one.link.quorum_id < quorum_id]:
            self._open.remove(end)
            end.link.connection.close(end)
