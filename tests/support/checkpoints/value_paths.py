"""Every path that a state takes through keepstep: out of one process, and back into another of the same form."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from keepstep.checkpoint import RelayReader, RelayWriter, async_save, load, save
from keepstep.checkpoint.interchange import Format, export_checkpoint, import_checkpoint
from keepstep.checkpointing import HTTPTransport, PGTransport, RelayTransport
from keepstep.one_copy.copies.frames import Frames, send_state
from keepstep.one_copy.copies.kept_bytes import Memory
from keepstep.sharded import AsyncCallsQueue, ShardedObject, ShardedTensor
from keepstep.sharded import load as load_sharded
from keepstep.sharded import save as save_sharded
from keepstep.state.flattening import Leaf, build, flatten
from tests.support.checkpoints.checkpoint_peer import exchange
from tests.support.checkpoints.value_kinds import blank
from tests.support.jobs.cohort import Cohort

MINUTE = timedelta(minutes=1)
State = dict[str, Any]
RoundTrip = Callable[[State, State], State]
"""Takes a state, and a destination that may be changed. Returns what arrived."""


class PeerRefused(Exception):
    """The other program does not write the value."""


@dataclass
class Scene:
    """Transports and places that all kinds use."""

    folder: Path
    relay: str
    direct: list[HTTPTransport[State]]
    relayed: list[RelayTransport[State]]
    cohort: Cohort
    steps: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new(self, suffix: str = "") -> Path:
        return self.folder / f"{next(self.steps)}{suffix}"

    # ---- live state

    def heal_direct(self, state: State, into: State) -> State:
        source, joiner = self.direct
        source.send_checkpoint([1], step := next(self.steps), state, MINUTE)
        return joiner.recv_checkpoint(0, source.metadata(), step, MINUTE, into=into)

    def heal_relayed(self, state: State, into: State) -> State:
        del into
        source, joiner = self.relayed
        step = next(self.steps)
        for one, name in ((source, "s0"), (joiner, "j0")):
            one.prepare(exchange(name, ["s0"], ["j0"], step))
        source.send_checkpoint([1], step, state, MINUTE)
        return joiner.recv_checkpoint(0, source.metadata(), step, MINUTE)

    def heal_over_group(self, state: State, into: State) -> State:
        step = next(self.steps)
        PGTransport[State](self.cohort.groups[0], MINUTE, torch.device("cpu"))._staging.stage(step, state)

        def take_part(group: Any, rank: int) -> Any:
            transport: PGTransport[State] = PGTransport(group, MINUTE, torch.device("cpu"))
            if rank == 0:
                return transport.send_checkpoint([1], step, state, MINUTE)
            return transport.recv_checkpoint(0, "", step, MINUTE, into=into)

        received: State = self.cohort.each(take_part)[1]
        return received

    def keep_copy(self, state: State, into: State) -> State:
        """Send a state as a job whose model exists once sends it to its keepers."""
        del into
        source, keeper = (Frames(end) for end in socket.socketpair())
        try:
            with ThreadPoolExecutor(1) as pool:
                kept = pool.submit(lambda: keeper.receive_stored(keeper.receive(60), Memory(), 60))
                try:
                    send_state([source], {}, state, limit=60)
                finally:
                    source.close()
                found: State = kept.result().state()
        finally:
            keeper.close()
        return found

    # ---- checkpoints

    def save(self, state: State, into: State) -> State:
        save(state, place := self.new(), sync=False)
        load(into, place)
        return into

    def save_at_relay(self, state: State, into: State) -> State:
        save(state, place := f"{self.relay}/v1/jobs/values/checkpoints/c{next(self.steps)}")
        load(into, place)
        return into

    def async_save(self, state: State, into: State) -> State:
        async_save(state, place := self.new(), sync=False).result(60)
        load(into, place)
        return into

    def relay_writer(self, state: State, into: State) -> State:
        place = self.new()
        try:
            dcp.save(state, storage_writer=RelayWriter(place))
        except dcp.api.CheckpointException as error:
            raise error.failures[0][0] from error
        dcp.load(into, storage_reader=RelayReader(place))
        return into

    def sharded(self, backend: str, *, in_background: bool, kind: str) -> RoundTrip:
        """Return the path of values as data of sharded tensors, of objects, or without sharding."""

        def leaves(state: State) -> State:
            if kind == "tensor":
                return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in state.items()}
            if kind == "object":
                return {key: ShardedObject(key, value, (1,), (0,)) for key, value in state.items()}
            return dict(state)

        def path(state: State, _into: State) -> State:
            place = self.new()
            request = save_sharded(leaves(state), place, (backend, 1), async_sharded_save=in_background)
            if request is not None:
                queue = AsyncCallsQueue()
                queue.schedule_async_request(request)
                queue.maybe_finalize_async_calls(blocking=True)
            wanted = {key: one.without_data() for key, one in leaves(state).items()} if kind != "common" else {}
            found: State = load_sharded(wanted, place)  # type: ignore[assignment]
            return found

        return path

    # ---- files of other programs

    def exported(self, form: Format) -> RoundTrip:
        def path(state: State, into: State) -> State:
            save(state, place := self.new(), sync=False)
            out = self.new({Format.TORCH: ".pt", Format.SAFETENSORS: ".safetensors", Format.DCP: ""}[form])
            export_checkpoint(place, out)
            if form is Format.TORCH:
                found: State = torch.load(out, weights_only=False)
                return found
            if form is Format.SAFETENSORS:
                found = load_file(out)
                return build({key: Leaf(leaf.path, found[key]) for key, leaf in flatten(state).items()})
            dcp.load(into, checkpoint_id=out)
            return into

        return path

    def imported(self, form: Format) -> RoundTrip:
        def path(state: State, into: State) -> State:
            out = self.new({Format.TORCH: ".pt", Format.SAFETENSORS: ".safetensors", Format.DCP: ""}[form])
            try:
                if form is Format.TORCH:
                    torch.save(state, out)
                elif form is Format.SAFETENSORS:
                    save_file(state, out)
                else:
                    dcp.save(state, checkpoint_id=out)
            except BaseException as error:
                raise PeerRefused(f"{type(error).__name__}: {error}") from error
            import_checkpoint(out, place := self.new())
            load(into, place)
            return into

        return path


@contextmanager
def scene(folder: Path, relay: str) -> Iterator[Scene]:
    folder.mkdir()
    direct: list[HTTPTransport[State]] = [HTTPTransport(MINUTE, 0, hostname="127.0.0.1") for _ in range(2)]
    relayed: list[RelayTransport[State]] = [
        RelayTransport(MINUTE, lambda: [relay], hostname="127.0.0.1") for _ in range(2)
    ]
    cohort = Cohort(2)
    cohort.configure()
    try:
        yield Scene(folder, relay, direct, relayed, cohort)
    finally:
        cohort.close()
        for one in (*direct, *relayed):
            one.shutdown()


def paths(one: Scene) -> dict[str, dict[str, RoundTrip]]:
    """Return the paths of each column of the table in docs/values.md, by name."""
    backends = {
        backend: {
            f"{backend} {kind}{' in background' * in_background}": one.sharded(
                backend, in_background=in_background, kind=kind
            )
            for kind in ("object", "common", "tensor")
            for in_background in (False, True)
        }
        for backend in ("keepstep", "torch_dist")
    }
    return {
        "heal": {
            "HTTPTransport": one.heal_direct,
            "RelayTransport": one.heal_relayed,
            "PGTransport": one.heal_over_group,
            "one copy": one.keep_copy,
        },
        "save": {"save": one.save, "save at a relay": one.save_at_relay, "async_save": one.async_save},
        "RelayWriter": {"RelayWriter": one.relay_writer},
        "sharded": backends["keepstep"],
        "torch_dist": backends["torch_dist"],
        **{
            column: {column: make(form)}
            for form, name in ((Format.TORCH, ".pt"), (Format.DCP, "DCP"), (Format.SAFETENSORS, "safetensors"))
            for column, make in ((f"{name} out", one.exported), (f"{name} in", one.imported))
        },
    }


def through(path: RoundTrip, state: State) -> State:
    return path(state, {key: blank(value) for key, value in state.items()})
