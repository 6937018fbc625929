"""The states of a job that its relays hold: the newest, the final one, and the part of this rank in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep.checkpoint.managed.due_checkpoints import Stored
from keepstep.checkpoint.managed.newest_checkpoint import find_final, find_newest
from keepstep.checkpoint.managed.rank_agreement import Choice
from keepstep.checkpoint.managed.rank_loading import load_rank
from keepstep.checkpoint.managed.resharding import load_resharded
from keepstep.connection.http_connection import Endpoint
from keepstep.relay_client.relay_paths import AtRelay
from keepstep.state.errors import CheckpointDamaged, StateDamaged


@dataclass(frozen=True)
class StoredStates:
    """Finds and loads the checkpoints of one job, for one rank."""

    job: str
    rank: int
    world_size: int
    relays: Callable[[], Mapping[str, Endpoint]]
    """Returns the relays that may have checkpoints, by address."""
    absent: Callable[[], Sequence[str]]
    """Returns the names of relays that had the newest checkpoint, and are not there."""
    endpoint: Callable[[str], Endpoint]
    """Returns the relay at an address."""
    token: Callable[[], str | None]
    """Returns the current token for relays."""
    copies: int
    """Relays that store each checkpoint."""
    connect_seconds: float
    """For relays to answer."""
    resume_wait: float
    """Seconds that relays which do not answer have to come back."""
    seconds: float
    """Time without progress after which a load fails."""
    _damage: dict[tuple[str, str], str] = field(default_factory=dict)
    """Copies that this group could not load. Only rank 0 uses them."""

    def newest(self) -> Choice:
        """Return the newest checkpoint that may be whole; empty: the relays have none.

        Raises:
            KeepstepError: the relays did not answer.
        """
        found, skipped = find_newest(
            lambda: list(self.relays().values()),
            self.job,
            seconds=self.connect_seconds,
            wait=self.resume_wait,
            copies=self.copies,
            absent=self.absent,
            damage=self._damage,
        )
        return {**_choice(found), "skipped": skipped} if found else {}

    def final(self, step: int, quorum_id: int) -> Choice:
        """Return the checkpoint of the final state of a closed job, or the reason in ``why_not``."""
        found, silent = find_final(list(self.relays().values()), self.job, step, quorum_id)
        if found:
            return _choice(found)
        return {"why_not": "; ".join(("no relay has it; finish(publish=True) in all groups stores it there", *silent))}

    def load(self, choice: Choice, into: Any) -> Any:
        """Return the part of this rank, loaded into the tensors of ``into``.

        Raises:
            StateDamaged: the checkpoint is damaged at every relay.
        """
        name, addresses = str(choice["id"]), tuple(choice["relays"])
        try:
            if int(choice["ranks"]) == self.world_size:
                relays = [self.endpoint(address) for address in addresses]
                return load_rank(*(relays, self.job, name, self.rank), into=into, seconds=self.seconds)
            first = self.rank % len(addresses)  # ranks begin at different relays
            location = AtRelay(addresses[first], self.job, name, (*addresses[first + 1 :], *addresses[:first]))
            return load_resharded(location, into, seconds=self.seconds, token=self.token())
        except CheckpointDamaged as error:
            raise StateDamaged(str(error)) from error

    def note_damage(self, choice: Choice, reason: str) -> None:
        """Let ``newest`` no longer return the copies of ``choice``."""
        self._damage.update({(relay, choice["id"]): reason for relay in choice["relays"]})


def _choice(found: Sequence[Stored]) -> Choice:
    one, relays = found[0], sorted(each.relay for each in found)
    facts = {"step": one.step, "quorum_id": one.quorum_id, "ranks": one.ranks, "committed": one.committed}
    return {"id": one.id, "relays": relays, **facts}
