"""The groups at which the shards of a model that exists once can be had: each member, and its keepers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator


class ShardSources:
    """Sources of the shards of the newest world that members have reported. Empty for other jobs."""

    def __init__(self) -> None:
        self._of: dict[str, frozenset[str]] = {}
        """By member: the groups that have its shards."""
        self._at: dict[str, set[str]] = {}
        """By group: the members whose shards it has."""
        self._told: set[str] = set()
        """Members that have told their keepers."""
        self.unheard: dict[str, float] = {}
        """Members that may live and come back: lost by their silence, or named by others only. The value is the time
        of that, in monotonic seconds."""

    def __bool__(self) -> bool:
        return bool(self._of)

    def begin(self, members: Iterable[str]) -> None:
        """A world was formed. The keepers of its members are not known yet."""
        self._of, self._at, self._told, self.unheard = {}, {}, set(), {}
        for member in members:
            self._note(member, ())

    def told(self, member: str, keepers: Iterable[str], keeps: Iterable[str]) -> None:
        """A member tells which groups have copies of its shards, and of which members it has copies itself.

        Of the latter count those that have told nothing themselves, since they know better. Keepers are members too.
        """
        self._told.add(member)
        self._note(member, keepers)
        for keeper in keepers:
            if keeper not in self._of:
                self._note(keeper, ())
        for owner in keeps:
            if owner not in self._told:
                self._note(owner, (*self._of.get(owner, ()), member))

    def _note(self, member: str, keepers: Iterable[str]) -> None:
        for source in self._of.get(member, ()):
            self._at[source].discard(member)
        self._of[member] = frozenset((member, *keepers))
        for source in self._of[member]:
            self._at.setdefault(source, set()).add(member)

    def silenced(self, group: str, now: float) -> None:
        """The group is lost by its silence, or only others have named it."""
        if group in self._of:
            self.unheard[group] = now

    def needs(self, group: str, kept: set[str]) -> bool:
        """Return whether ``kept`` have a shard that they do not have without ``group``."""
        return any(self._of[member] & kept == {group} for member in self._at.get(group, ()))

    def lost_without(self, kept: set[str], alive: Collection[str]) -> Iterator[str]:
        """Yield the groups of ``alive``, sorted, that have shards of which ``kept`` have none."""
        missing = [sources for sources in self._of.values() if not sources & kept]
        yield from sorted({one for sources in missing for one in sources if one in alive})
