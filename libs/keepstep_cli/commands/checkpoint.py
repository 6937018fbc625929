"""``keepstep checkpoint``: what relays hold, whether it is good, and how to be rid of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep_cli.asking.options import client_options
from keepstep_cli.asking.rest import Lighthouse, Relay, read_token, run
from keepstep_cli.errors import Refused, Unreachable

if TYPE_CHECKING:
    from keepstep_mesh.security.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class Link:
    """The checkpoints of one job at one relay."""

    relay: Relay
    job: str
    as_json: bool

    def path(self, *path: str) -> tuple[str, ...]:
        return ("jobs", self.job, "checkpoints", *path)


def _linked(function: Callable[..., None]) -> Callable[..., None]:
    """Gives ``function`` a Link for the options that all these commands have."""

    @click.option(
        "--relay",
        "relays",
        envvar="KEEPSTEP_RELAY",
        metavar="URL[,URL]",
        help="The relay.  [env: KEEPSTEP_RELAY; default: the first that the lighthouse knows]",
    )
    @client_options
    @functools.wraps(function)
    def with_link(
        *,
        relays: str | None,
        addresses: str | None,
        job: str,
        token_file: Path | None,
        tls: TlsFiles,
        as_json: bool,
        **others: Any,
    ) -> None:
        token = read_token(token_file)
        told = relays is None
        if told:
            services = run(Lighthouse(addresses, token, tls).get("cluster"))["services"]
            relays = ",".join(one["address"] for one in services if one["kind"] == "relay")
            if not relays:
                advice = f"Start one with {Relay.starts}, or say where it is with {Relay.flags}."
                raise Unreachable(f"the lighthouse knows of no relay. {advice}")
        function(Link(Relay(relays, token, tls, told=told), job, as_json), **others)

    return with_link


@click.group()
def checkpoint() -> None:
    """List, show, verify and remove checkpoints of a relay."""


@checkpoint.command("ls")
@_linked
def list_all(link: Link) -> None:
    """Show the checkpoints of a job."""
    answer = run(link.relay.get(*link.path()))
    if link.as_json:
        print(json.dumps(answer, indent=2))
        return
    from keepstep_cli.asking import tables

    tables.show_checkpoints(answer["checkpoints"])


@checkpoint.command()
@_linked
@click.argument("checkpoint")
def show(link: Link, checkpoint: str) -> None:
    """Show all about one checkpoint."""
    answer = run(link.relay.get(*link.path(checkpoint)))
    if link.as_json:
        print(json.dumps(answer, indent=2))
        return
    from keepstep_cli.asking import tables

    tables.show_facts(answer["checkpoint"])
    tables.show_ranks(answer["by_rank"])


@checkpoint.command()
@_linked
@click.argument("checkpoint")
def verify(link: Link, checkpoint: str) -> None:
    """Fetch every chunk of a checkpoint and compare it with its digest. Exit code 1: not all of it is good."""
    found = run(_verify(link, checkpoint))
    if link.as_json:
        print(json.dumps(found, indent=2))
    else:
        for one in found["damaged"]:
            print(f"rank {one['rank']} chunk {one['chunk']}: {one['reason']}")
        size = f"{found['chunks']} chunks, {found['bytes']} bytes"
        print(
            f"{checkpoint}: {size}, {len(found['damaged'])} damaged"
            if found["damaged"]
            else f"{checkpoint}: {size}, good"
        )
    if found["damaged"]:
        raise SystemExit(1)


async def _verify(link: Link, checkpoint: str) -> dict[str, Any]:
    from keepstep_mesh.errors import ManifestError
    from keepstep_mesh.protocol.manifest import (
        CHUNK_BYTES,
        MAX_MANIFEST_BYTES,
        chunk_digest,
        chunk_length,
        read_envelope,
    )

    facts = (await link.relay.get(*link.path(checkpoint)))["checkpoint"]
    damaged: list[dict[str, Any]] = []
    chunks = size = 0
    for rank in range(facts["ranks"]):
        try:
            manifest = await link.relay.read(*link.path(checkpoint, "manifest"), limit=MAX_MANIFEST_BYTES, rank=rank)
            envelope = read_envelope(manifest)
        except (Refused, ManifestError) as error:
            damaged.append({"rank": rank, "chunk": None, "reason": str(error)})
            continue
        chunks, size = chunks + len(envelope.chunk_digests), size + envelope.pack_bytes
        for number, digest in enumerate(envelope.chunk_digests):
            try:
                data = await link.relay.read("chunks", digest.hex(), limit=CHUNK_BYTES)
            except Refused as error:
                damaged.append({"rank": rank, "chunk": number, "reason": str(error)})
                continue
            if len(data) != chunk_length(envelope.pack_bytes, number) or chunk_digest(data) != digest:
                damaged.append({"rank": rank, "chunk": number, "reason": "its bytes do not have its digest"})
    return {"job": link.job, "id": checkpoint, "chunks": chunks, "bytes": size, "damaged": damaged}


@checkpoint.command()
@_linked
@click.argument("checkpoint")
def rm(link: Link, checkpoint: str) -> None:
    """Delete a checkpoint from every tier of the relay. Needs the admin token."""
    run(link.relay.delete(*link.path(checkpoint)))
    print(
        json.dumps({"job": link.job, "id": checkpoint, "removed": True}) if link.as_json else f"{checkpoint}: removed"
    )
