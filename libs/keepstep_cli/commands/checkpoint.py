"""``keepstep checkpoint``: list, show, verify, and remove checkpoints of a relay. ``checkpoint_files`` has the rest."""

from __future__ import annotations

import json
from typing import Any

import click

from keepstep_cli.asking.job_link import JobAtRelay, show_json, with_relay
from keepstep_cli.asking.progress import Progress, showing_progress
from keepstep_cli.asking.rest import run
from keepstep_cli.commands.checkpoint_files import export_files, import_files
from keepstep_cli.errors import Refused


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
@with_relay
@click.argument("checkpoint")
def show(link: JobAtRelay, checkpoint: str) -> None:
    """Show everything about one checkpoint."""
    answer = run(link.service.checkpoint(link.job, checkpoint))
    if link.as_json:
        show_json(answer)
        return
    from keepstep_cli.asking import tables

    tables.show_facts(answer["checkpoint"])
    tables.show_ranks(answer["by_rank"])


@checkpoint.command()
@with_relay
@click.argument("checkpoint")
def verify(link: JobAtRelay, checkpoint: str) -> None:
    """Fetch every chunk of a checkpoint and compare it with its digest.

    Exit code: 0 all chunks are intact, 1 a chunk is damaged or missing.
    """
    with showing_progress() as progress:
        found = run(_verify(link, checkpoint, progress))
    if link.as_json:
        show_json(found)
    else:
        for one in found["damaged"]:
            print(f"rank {one['rank']} chunk {one['chunk']}: {one['reason']}")
        from keepstep_mesh.text import bytes_text

        size = f"{found['chunks']} chunks, {bytes_text(found['bytes'])}"
        print(
            f"{checkpoint}: {size}, {len(found['damaged'])} damaged"
            if found["damaged"]
            else f"{checkpoint}: {size}, good"
        )
    if found["damaged"]:
        raise SystemExit(1)


async def _verify(link: JobAtRelay, checkpoint: str, progress: Progress) -> dict[str, Any]:
    from keepstep_mesh.errors import ManifestError
    from keepstep_mesh.protocol.manifest import (
        CHUNK_BYTES,
        MAX_MANIFEST_BYTES,
        chunk_digest,
        chunk_length,
        read_envelope,
    )

    facts = (await link.service.checkpoint(link.job, checkpoint))["checkpoint"]
    damaged: list[dict[str, Any]] = []
    chunks = size = done = 0
    for rank in range(facts["ranks"]):
        try:
            manifest = await link.service.manifest(link.job, checkpoint, rank, limit=MAX_MANIFEST_BYTES)
            envelope = read_envelope(manifest)
        except (Refused, ManifestError) as error:
            damaged.append({"rank": rank, "chunk": None, "reason": str(error)})
            continue
        chunks, size = chunks + len(envelope.chunk_digests), size + envelope.pack_bytes
        for number, digest in enumerate(envelope.chunk_digests):
            progress("verifying", done, facts["bytes"])
            done += chunk_length(envelope.pack_bytes, number)
            try:
                data = await link.service.chunk(digest, limit=CHUNK_BYTES)
            except Refused as error:
                damaged.append({"rank": rank, "chunk": number, "reason": str(error)})
                continue
            if len(data) != chunk_length(envelope.pack_bytes, number) or chunk_digest(data) != digest:
                damaged.append({"rank": rank, "chunk": number, "reason": "the bytes do not match the digest"})
    return {"job": link.job, "id": checkpoint, "chunks": chunks, "bytes": size, "damaged": damaged}


@checkpoint.command()
@with_relay
@click.argument("checkpoint")
def rm(link: JobAtRelay, checkpoint: str) -> None:
    """Delete a checkpoint from every tier of the relay. Needs the admin token."""
    run(link.service.remove(link.job, checkpoint))
    print(
        json.dumps({"job": link.job, "id": checkpoint, "removed": True}) if link.as_json else f"{checkpoint}: removed"
    )
