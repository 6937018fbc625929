"""One rank whose copies this process keeps: what comes on its connection."""

from __future__ import annotations

from typing import Any

from keepstep.one_copy.copies.frames import CopyError, Frames, NoMemoryError
from keepstep.one_copy.copies.keeper import Keeper
from keepstep.one_copy.copies.kept_bytes import Stored
from keepstep.one_copy.core.holding import State


class Owner:
    """Takes what a rank sends.

    Args:
        keeper: of the copies.
        frames: the connection.
        hello: the first header.
        timeout: longest time without progress within a state, seconds.
    """

    def __init__(self, keeper: Keeper, frames: Frames, hello: dict[str, Any], timeout: float) -> None:
        self._keeper = keeper
        self._frames = frames
        self._timeout = timeout
        self._hello = hello
        self.quorum_id = int(hello["quorum"])
        """Of the quorum in which it took its place."""
        self._key = int(hello["world"]), int(hello["rank"]), self.quorum_id
        self._early: dict[int, Stored] = {}
        """Gradients by slice, which may have changed after they were sent."""
        self._changed: list[int] = []
        """Slices whose gradients have changed."""
        self._full = ""
        """Why no more parts of this step are kept; empty: they are."""

    def serve(self) -> None:
        """Take all parts until the connection ends. CopyError: it has ended."""
        hello = self._hello
        due = self._keeper.begin(
            *(*self._key, hello["names"], int(hello["need"])),
            whole=bool(hello["whole"]),
            fill=bool(hello["fill"]),
            boxes=hello["boxes"],
            again=bool(hello["again"]),
        )
        self._frames.send({"kind": "begun", "due": due}, limit=self._timeout)
        while True:
            header = self._frames.receive(float("inf"))
            self._take(header, header["part"], State(header["step"], header["lineage"]))

    def _take(self, header: dict[str, Any], part: str, state: State) -> None:
        number = header.get("slice", 0)
        stored = self._received(header) if "content" in header else None
        if part == "early":
            for one, content in zip(header["slices"], header["contents"], strict=True):
                if (early := self._received({"content": content, "sealed": False})) is not None:
                    self._early[one] = early
            return
        if self._full:
            if part == "end":
                self._give_up()
            return
        match part:
            case "commit":
                self._keeper.commit(*self._key, state)
            case "seal":
                for one, digests in header["digests"]:
                    early = self._early.pop(one)
                    if early.digests == digests:
                        self._keeper.take(*self._key, "gradients", state, one, early)
                    else:
                        self._changed.append(one)
            case _ if stored is None:
                raise CopyError(f"a part {part!r} of a copy has no state")
            case "end":
                self._end(state, stored)
            case _:
                self._keeper.take(*self._key, part, state, number, stored)

    def _end(self, state: State, stored: Stored) -> None:
        """Confirm a step, unless a part of it is missing."""
        changed, self._changed, self._early = self._changed, [], {}
        if changed:
            self._frames.send({"kind": "changed", "slices": changed}, limit=self._timeout)
            return
        self._keeper.take(*self._key, "end", state, 0, stored)
        world, rank, _ = self._key
        if not self._keeper.has(world, rank, state):
            raise CopyError(f"the copy of rank {rank} of world {world} at step {state.step} is not whole")
        self._frames.send({"kind": "kept", "step": state.step, "lineage": state.lineage}, limit=self._timeout)

    def _received(self, header: dict[str, Any]) -> Stored | None:
        """Return the state that follows ``header``; None: no memory is left."""
        if not self._full:
            try:
                return self._frames.receive_stored(header, self._keeper.memory, self._timeout)
            except NoMemoryError as error:
                self._full = str(error)
        self._frames.skip_state(header, self._timeout)
        return None

    def _give_up(self) -> None:
        """Tell the owner that it is exposed. The copy of its last step is kept: the step after it may be dropped."""
        self._early = {}
        self._keeper.give_up(*self._key)
        self._frames.send({"kind": "full", "reason": self._full}, limit=self._timeout)
        raise CopyError(self._full)
