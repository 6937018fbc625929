"""Committed checkpoints as directories of torch.distributed.checkpoint, which its plain ``load`` reads through fsspec.

The directory is computed from the manifests when a file of it is asked for, and kept for the following requests.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus

from aiohttp import hdrs, web

from keepstep_mesh.errors import ManifestError
from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol.manifest import read_envelope
from keepstep_mesh.protocol.state_content import unpack_content
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.openapi import Shape
from keepstep_relay.api import requests
from keepstep_relay.api.downloads import Downloads, asked_range
from keepstep_relay.core.events import Key, ReadFrom
from keepstep_relay.node import RelayNode
from keepstep_relay.tiers.chunks import ROOM_SECONDS
from keepstep_relay.torch_view.pickle_writer import PackRange
from keepstep_relay.torch_view.torch_files import METADATA, TorchDirectory, TorchFile, file_name, torch_directory

JOINED_BYTES = 64 << 10
"""Shorter parts are sent together."""
ONE = "/v1/jobs/{job}/checkpoints/{id}"
OF_RANK = f"{ONE}/__{{rank}}_{{version}}.distcp"
SHAPES = {
    f"GET {ONE}/": Shape(None, gives_page=True),
    f"HEAD {ONE}/{METADATA}": Shape(None),
    f"GET {ONE}/{METADATA}": Shape(None, gives_bytes=True),
    f"HEAD {OF_RANK}": Shape(None),
    f"GET {OF_RANK}": Shape(None, gives_bytes=True),
}
_NUMBER = re.compile(r"0|[1-9]\d{0,8}")


def routes(relay: RelayNode) -> list[Route]:
    here = _TorchFiles(relay)
    return [
        Route("GET", f"{ONE}/", here.list, Access.READ, "links to the files for torch.distributed.checkpoint"),
        Route("HEAD", f"{ONE}/{METADATA}", here.has_file, Access.READ, "size of the file that GET returns"),
        Route("GET", f"{ONE}/{METADATA}", here.get_file, Access.READ, "metadata for torch.distributed.checkpoint"),
        Route("HEAD", OF_RANK, here.has_file, Access.READ, "size of the file that GET returns"),
        Route("GET", OF_RANK, here.get_file, Access.READ, "what a rank has stored, for torch.distributed.checkpoint"),
    ]


class _TorchFiles:
    def __init__(self, relay: RelayNode) -> None:
        self._relay = relay
        self._store = relay.checkpoints
        self._downloads = Downloads(relay)

    async def list(self, request: web.Request) -> web.Response:
        directory = await self._directory(requests.key(request, self._relay.core))
        links = "".join(f'<li><a href="{name}">{name}</a> {one.size}</li>\n' for name, one in directory.files.items())
        page = f"<!DOCTYPE html>\n<title>{request.match_info['id']}</title>\n<ul>\n{links}</ul>\n"
        return web.Response(text=page, content_type="text/html")

    async def has_file(self, request: web.Request) -> web.Response:
        _, directory, file = await self._file(request)
        headers: dict[str, str] = {hdrs.CONTENT_LENGTH: str(file.size), hdrs.CONTENT_TYPE: requests.RAW}
        return web.Response(headers={**headers, hdrs.ACCEPT_RANGES: "bytes", **_tag(directory)})

    async def get_file(self, request: web.Request) -> web.StreamResponse:
        key, directory, file = await self._file(request)
        asked = asked_range(request, file.size)
        parts = self._parts(key, file, asked)
        return await self._downloads.answer(request, parts, asked, file.size, _tag(directory), request.path)

    async def _file(self, request: web.Request) -> tuple[Key, TorchDirectory, TorchFile]:
        key, text = requests.key(request, self._relay.core), request.match_info.get("rank")
        name = METADATA
        if text is not None:
            version = request.match_info["version"]
            if _NUMBER.fullmatch(version) is None:
                raise Problem(HTTPStatus.NOT_FOUND, f"{key} has no version {version[:40]!r}")
            key = key.at(int(version))
            name = file_name(int(text), key.version) if _NUMBER.fullmatch(text) else ""
        directory = await self._directory(key)
        if name not in directory.files:
            ranks = len(directory.files) - 1
            raise Problem(HTTPStatus.NOT_FOUND, f"{key} has no rank {text!r}: expected 0 to {ranks - 1}")
        return key, directory, directory.files[name]

    async def _parts(self, key: Key, file: TorchFile, asked: range) -> AsyncGenerator[memoryview]:
        """Yield bytes of a file. Short parts are joined, because each takes two system calls."""
        tables, joined = self._relay.core.checkpoint(key).tables, bytearray()
        for segment in file.cut(asked.start, asked.stop):
            if not isinstance(segment, PackRange):
                joined += segment
            else:
                whole = range(segment.offset, segment.offset + segment.length)
                async with aclosing(self._downloads.pack(key, tables[segment.rank], whole, 0.0)) as chunks:
                    async for data in chunks:
                        if len(joined) + data.nbytes <= JOINED_BYTES:
                            joined += data
                            continue
                        if joined:
                            yield memoryview(bytes(joined))
                            joined.clear()
                        yield data
            if len(joined) > JOINED_BYTES:
                yield memoryview(bytes(joined))
                joined.clear()
        if joined:
            yield memoryview(bytes(joined))

    async def _directory(self, key: Key) -> TorchDirectory:
        """Return the directory of a committed checkpoint. ``Problem`` if it has none."""
        self._roots(key)
        async with self._relay.chunks.locks("torch files"):  # computing one may take several times its memory
            roots = self._roots(key)
            self._relay.chunks.step(ReadFrom(key))
            found = self._relay.directories.get(key, roots)
            if found is None:
                manifests = [self._store.manifests[key, rank] for rank in range(len(roots))]
                try:
                    found = await self._relay.chunks.in_thread(_compute, key.version, roots, manifests)
                except ManifestError as error:
                    raise Problem(
                        HTTPStatus.CONFLICT,
                        f"{key} has no files for torch.distributed.checkpoint: {error}; use keepstep.checkpoint.load",
                    ) from error
                await self._keep(key, roots, found)
            return found

    def _roots(self, key: Key) -> tuple[bytes, ...]:
        one = self._relay.core.checkpoint(key)
        if one.committed_at is None:
            raise Problem(HTTPStatus.CONFLICT, f"{key} is not committed: its state is {one.state.value}")
        return tuple(one.tables[rank].root for rank in range(one.facts.ranks))

    async def _keep(self, key: Key, roots: tuple[bytes, ...], directory: TorchDirectory) -> None:
        """Keep a directory. Its memory counts as that of manifests, and is freed when the checkpoint is deleted."""
        kept, size = self._relay.directories, directory.literal_bytes
        kept.make_room()
        await self._relay.chunks.memory.reserve(size, ROOM_SECONDS)
        if key in self._relay.core.checkpoints:
            kept.keep(key, roots, directory)
        else:
            self._relay.chunks.memory.release(size)  # deleted while its directory was computed


def _compute(version: int, roots: tuple[bytes, ...], manifests: list[bytes]) -> TorchDirectory:
    contents = [unpack_content(read_envelope(one).content_bytes) for one in manifests]
    return torch_directory(roots, contents, version)


def _tag(directory: TorchDirectory) -> dict[str, str]:
    return {hdrs.ETAG: f'"{directory.digest.hex()}"'}
