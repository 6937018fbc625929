"""``keepstep checkpoint``: list, show, verify, and remove checkpoints. ``checkpoint_files`` converts them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Protocol

import click

from keepstep_cli.asking.checkpoint_place import Places, with_places
from keepstep_cli.asking.job_link import JobAtRelay, show_json, with_relay
from keepstep_cli.asking.progress import Progress, showing_progress
from keepstep_cli.asking.rest import Relay, run
from keepstep_cli.commands.checkpoint_files import export_files, import_files
from keepstep_cli.errors import Missing, Refused


@click.group()
def checkpoint() -> None:
    """List, show, verify, remove and convert checkpoints."""


checkpoint.add_command(export_files)
checkpoint.add_command(import_files)


@checkpoint.command("ls")
@with_relay
def list_all(link: JobAtRelay) -> None:
    """Show the checkpoints of a job."""
    answer = run(link.service.checkpoints(link.job))
    if link.as_json:
        show_json(answer)
        return
    from keepstep_cli.asking import tables

    tables.show_checkpoints(answer["checkpoints"])


@checkpoint.command()
@with_places
@click.argument("checkpoint")
def show(places: Places, checkpoint: str) -> None:
    """Show everything about one checkpoint.

    CHECKPOINT is a name at the relay, a URL, or a directory (with a slash: ./checkpoint).
    """
    with _opened(places, checkpoint) as stored:
        answer = run(stored.facts())
    if places.as_json:
        show_json(answer)
        return
    from keepstep_cli.asking import tables

    tables.show_facts(answer["checkpoint"])
    tables.show_ranks(answer["by_rank"])


@checkpoint.command()
@with_places
@click.argument("checkpoint")
def verify(places: Places, checkpoint: str) -> None:
    """Read every chunk of a checkpoint and compare it with its digest.

    CHECKPOINT is a name at the relay, a URL, or a directory (with a slash: ./checkpoint).

    Exit code: 0 all chunks are intact, 1 a chunk is damaged or missing.
    """
    with _opened(places, checkpoint) as stored, showing_progress() as progress:
        found = run(_verify(stored, progress))
    if places.as_json:
        show_json({"job": stored.job, "id": checkpoint, **found})
    else:
        for one in found["damaged"]:
            chunk = "" if one["chunk"] is None else f" chunk {one['chunk']}"
            print(f"rank {one['rank']}{chunk}: {one['reason']}")
        from keepstep_mesh.text import bytes_text

        size = f"{found['chunks']} chunks, {bytes_text(found['bytes'])}"
        print(
            f"{checkpoint}: {size}, {len(found['damaged'])} damaged"
            if found["damaged"]
            else f"{checkpoint}: {size}, good"
        )
    if found["damaged"]:
        raise SystemExit(1)


async def _verify(stored: _Stored, progress: Progress) -> dict[str, Any]:
    from keepstep_mesh.errors import KeepstepError
    from keepstep_mesh.protocol.manifest import chunk_digest, chunk_length, read_envelope

    ranks, total = await stored.extent()
    damaged: list[dict[str, Any]] = []
    chunks = size = done = 0
    for rank in range(ranks):
        try:
            envelope = read_envelope(await stored.manifest(rank))
        except (Refused, KeepstepError) as error:
            damaged.append({"rank": rank, "chunk": None, "reason": str(error)})
            continue
        chunks, size = chunks + len(envelope.chunk_digests), size + envelope.pack_bytes
        for number, digest in enumerate(envelope.chunk_digests):
            progress("verifying", done, total)
            length = chunk_length(envelope.pack_bytes, number)
            done += length
            try:
                data = await stored.chunk(rank, number, length, digest)
            except (Refused, KeepstepError) as error:
                damaged.append({"rank": rank, "chunk": number, "reason": str(error)})
                continue
            if len(data) != length or chunk_digest(data) != digest:
                damaged.append({"rank": rank, "chunk": number, "reason": "the bytes do not match the digest"})
    return {"chunks": chunks, "bytes": size, "damaged": damaged}


class _Stored(Protocol):
    """A checkpoint at a relay or in a directory. Its parts raise ``Refused`` or ``KeepstepError``."""

    @property
    def job(self) -> str | None: ...

    async def facts(self) -> dict[str, Any]:
        """Return what ``show`` shows."""

    async def extent(self) -> tuple[int, int]:
        """Return the number of ranks, and that of bytes (0: not known)."""

    async def manifest(self, rank: int) -> bytes:
        """Return the manifest of a rank."""

    async def chunk(self, rank: int, number: int, length: int, digest: bytes) -> bytes:
        """Return a chunk, which is not verified."""


class _AtRelay:
    def __init__(self, relay: Relay, job: str, name: str) -> None:
        self._relay = relay
        self._name = name
        self.job = job

    async def facts(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._relay.checkpoint(self.job, self._name)
        return answer

    async def extent(self) -> tuple[int, int]:
        facts = (await self.facts())["checkpoint"]
        self._name = f"{facts['id']}~{facts['version']}"  # also while a save overwrites it
        return facts["ranks"], facts["bytes"]

    async def manifest(self, rank: int) -> bytes:
        from keepstep_mesh.protocol.manifest import MAX_MANIFEST_BYTES

        return await self._relay.manifest(self.job, self._name, rank, limit=MAX_MANIFEST_BYTES)

    async def chunk(self, rank: int, number: int, length: int, digest: bytes) -> bytes:  # noqa: ARG002
        from keepstep_mesh.protocol.manifest import CHUNK_BYTES

        return await self._relay.chunk(digest, limit=CHUNK_BYTES)


class _InDirectory:
    job = None

    def __init__(self, name: str) -> None:
        places = "keepstep.checkpoint.places"  # loaded by name: only commands that need torch import it
        self._path = importlib.import_module(f"{places}.location").parse(name).path
        self._source = importlib.import_module(f"{places}.directory").DirectorySource(self._path)
        from keepstep.state.errors import CheckpointNotFound

        try:
            self._record = self._source.record()
        except CheckpointNotFound as error:
            raise Refused(str(error), HTTPStatus.NOT_FOUND) from error

    async def facts(self) -> dict[str, Any]:
        record, by_rank = self._record, []
        for rank, root in enumerate(record["roots"]):
            envelope = self._source.manifest(rank, root).envelope
            facts = {"bytes": envelope.pack_bytes, "chunks": len(envelope.chunk_digests), "lacking": 0}
            producers = {envelope.origin.producer: root}
            by_rank.append({"rank": rank, "root": root, "roots": producers, **facts, "reported": True})
        shown = {name: record.get(name) for name in ("step", "ranks", "committed", "producer")}
        sums = {name: sum(one[name] for one in by_rank) for name in ("bytes", "chunks")}
        return {"checkpoint": {"id": str(self._path), **shown, **sums}, "by_rank": by_rank}

    async def extent(self) -> tuple[int, int]:
        return len(self._record["roots"]), 0

    async def manifest(self, rank: int) -> bytes:
        data: bytes = self._source.manifest(rank, self._record["roots"][rank]).data
        return data

    async def chunk(self, rank: int, number: int, length: int, digest: bytes) -> bytes:  # noqa: ARG002
        from keepstep_mesh.protocol.manifest import CHUNK_BYTES

        data = bytearray(length)
        self._source.fetch(rank, number * CHUNK_BYTES, length, lambda fill: fill(memoryview(data)))
        return bytes(data)


@contextmanager
def _opened(places: Places, name: str) -> Iterator[_Stored]:
    """Yield the checkpoint of this name, which exists."""
    from keepstep_mesh.errors import KeepstepError

    checkpoint_id = places.existing(name)
    at = places.at_relay(checkpoint_id)
    try:
        yield _InDirectory(checkpoint_id) if at is None else _AtRelay(*at)
    except ImportError as error:
        raise Missing(f"this command needs {error.name}: pip install 'keepstep[train]'") from error
    except KeepstepError as error:
        raise click.ClickException(str(error)) from error


@checkpoint.command()
@with_places
@click.argument("checkpoint")
def rm(places: Places, checkpoint: str) -> None:
    """Delete a checkpoint from every tier of the relay. Needs the admin token."""
    at = places.at_relay(places.existing(checkpoint))
    if at is None:
        raise click.UsageError(f"{checkpoint} is a directory: delete it as any other, such as with rm -r")
    relay, job, name = at
    run(relay.remove(job, name))
    print(json.dumps({"job": job, "id": checkpoint, "removed": True}) if places.as_json else f"{checkpoint}: removed")
