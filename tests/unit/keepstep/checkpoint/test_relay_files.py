"""Files at a relay, whose folders are committed as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from contextlib import AsyncExitStack, contextmanager
from datetime import timedelta

import pytest

from keepstep.checkpoint.places import relay_files
from keepstep.checkpoint.places.relay_files import RelayFiles
from keepstep.relay_client.uploading import RelayUpload
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_relay.core.events import Key, Limits
from tests.support.services.relay_driver import relay

LARGE = random.Random(1).randbytes(CHUNK_BYTES + 1000)


@contextmanager
def files(address: str, job: str = "j"):
    one = RelayFiles(f"{address}/v1/jobs/{job}/checkpoints", kind="live", timeout=timedelta(seconds=30), token=None)
    try:
        yield one
    finally:
        one.close()


def content(one: RelayFiles, folder: str) -> dict[str, bytes]:
    return {
        name: b"".join(bytes(one.chunk(file, number)) for number in range(len(file.envelope.chunk_digests)))
        for name, file in one.files(folder).items()
    }


async def test_files_of_several_processes_become_one_checkpoint():
    async with relay() as at:

        def check() -> None:
            with files(at.address) as one, files(at.address) as other:
                one.write("tmp", "large", memoryview(LARGE))
                one.write("tmp", "old", memoryview(b"old"))
                other.write("tmp", "sub/empty", memoryview(b""))
                one.write("tmp", "old", memoryview(b"new"))
                one.write("tmp", "gone", memoryview(b"x"))
                other.remove_file("tmp", "gone")
                expected = {"large": LARGE, "old": b"new", "sub/empty": b""}
                assert content(other, "tmp") == expected
                assert one.folders() == []
                one.commit("tmp", "step-7")
                assert content(other, "step-7") == expected
                assert (other.files("tmp"), other.folders()) == ({}, ["step-7"])
                other.remove("step-7")
                assert other.files("step-7") == {}

        await asyncio.to_thread(check)


async def test_a_commit_never_replaces_files_and_committed_files_never_change():
    async with relay() as at:

        def check() -> None:
            with files(at.address) as one:
                with pytest.raises(FileNotFoundError, match="tmp has no open files"):
                    one.commit("tmp", "a")
                one.write("tmp", "f", memoryview(b"1"))
                one.commit("tmp", "a")
                one.write("tmp", "f", memoryview(b"2"))
                with pytest.raises(FileExistsError, match="a has files already"):
                    one.commit("tmp", "a")
                for change in (lambda: one.write("a", "f", memoryview(b"3")), lambda: one.remove_file("a", "f")):
                    with pytest.raises(PermissionError, match="never changes"):
                        change()
                assert content(one, "a") == {"f": b"1"}
                assert content(one, "tmp") == {"f": b"2"}
                one.remove("tmp")
                with pytest.raises(OSError, match="invalid folder"):
                    one.write("open-x", "f", memoryview(b""))

        await asyncio.to_thread(check)
        step = at.core.checkpoints[Key("j", "a")].facts.step
        assert step == 0


async def test_open_files_live_as_long_as_their_process(monkeypatch):
    monkeypatch.setattr(relay_files, "LEASE_SECONDS", 0.1)
    async with relay(limits=Limits(upload_seconds=2.0)) as at:
        key = Key("j", "")

        def write() -> None:
            nonlocal key
            with files(at.address) as one:
                one.write("tmp", "f", memoryview(b"1"))
                (upload,) = at.core.checkpoints.values()
                key = upload.key
                signs = {upload.heard.get(0)}
                while len(signs) < 4:
                    assert content(one, "tmp") == {"f": b"1"}
                    signs.add(upload.heard.get(0))

        async with asyncio.timeout(60):
            await asyncio.to_thread(write)
            while key in at.core.checkpoints:
                with contextlib.suppress(TimeoutError):
                    await at.chunks.notifier.wait(key, asyncio.get_running_loop().time() + 1)


async def test_files_outlive_a_restart_of_a_relay_with_a_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(relay_files, "LEASE_SECONDS", 0.1)
    limits, usual = Limits(upload_seconds=2.0), RelayUpload.send
    async with AsyncExitStack() as running:
        at = await running.enter_async_context(relay(data_dir=tmp_path, limits=limits))
        loop = asyncio.get_running_loop()

        async def restart() -> None:
            nonlocal at
            bind = at.address.removeprefix("http://")
            await running.aclose()
            at = await running.enter_async_context(relay(bind=bind, data_dir=tmp_path, limits=limits))

        def restarting() -> None:
            asyncio.run_coroutine_threadsafe(restart(), loop).result(60)

        def send(self, *how):
            usual(self, *how)
            if (self._checkpoint.rank, self._checkpoint.id) == (0, "step-1"):
                restarting()

        def check(address: str) -> None:
            with files(address) as one:
                one.write("tmp", "a", memoryview(b"1"))
                one.write("tmp", "b", memoryview(b"2"))
                restarting()
                for upload in at.core.checkpoints.values():
                    until, signs = time.monotonic() + 60, {upload.heard.get(0)}
                    while len(signs) < 3:
                        assert time.monotonic() < until, "no sign of life"
                        signs.add(upload.heard.get(0))
                assert content(one, "tmp") == {"a": b"1", "b": b"2"}
                one.commit("tmp", "step-1")
                assert content(one, "step-1") == {"a": b"1", "b": b"2"}

        monkeypatch.setattr(RelayUpload, "send", send)
        await asyncio.to_thread(check, at.address)
