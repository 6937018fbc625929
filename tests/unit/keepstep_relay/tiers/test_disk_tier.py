"""Chunks that the disk tier writes past the cache of the system, and where it cannot."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep_mesh.protocol.manifest import CHUNK_BYTES, chunk_digest
from keepstep_relay.tiers.disk_tier import DiskError, DiskTier
from keepstep_relay.tiers.memory_tier import MemoryTier
from keepstep_relay.tiers.shared_slots import SharedSlots


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", *options, str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(mount)} needs root and support of the kernel")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[DiskTier]:
    with contextlib.closing(DiskTier(folder)) as tier:
        tier.open()
        yield tier


def memory_tier() -> MemoryTier:
    return MemoryTier(4 * CHUNK_BYTES, lambda _: None)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    with opened(tmp_path / "disk") as tier:
        yield tier


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each file that is synced bypasses the cache at that time."""
    seen = list[bool]()
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        seen.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def bypasses(folder: Path) -> bool:
    """Whether the file system of ``folder`` accepts such writes, and refuses those that are not aligned."""
    path = folder / "tried"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        os.write(descriptor, b"x")
    except OSError as error:
        return error.errno == errno.EINVAL
    finally:
        os.close(descriptor)
        path.unlink()
    return False


def fill(data: memoryview, seed: int = 1) -> bytes:
    """Fill a chunk. Return its digest."""
    data[:] = random.Random(seed).randbytes(data.nbytes)
    return chunk_digest(data)


def check(disk: DiskTier, data: memoryview, seed: int = 1) -> None:
    digest = fill(data, seed)
    disk.write(digest, data, sync=True)
    back = memoryview(bytearray(data.nbytes))
    disk.read(digest, back)
    assert back == data
    assert not [*(disk.folder / "partial").iterdir()]


def test_a_full_chunk_of_either_memory_is_written_past_the_cache_and_synced(
    disk: DiskTier, tmp_path: Path, synced: list[bool]
) -> None:
    memory = memory_tier()
    check(disk, memory.buffer(CHUNK_BYTES))
    with contextlib.closing(SharedSlots(2)) as slots:
        memory.slots = slots
        for seed in (2, 3):
            check(disk, memory.buffer(CHUNK_BYTES), seed)
    assert synced == 3 * [bypasses(tmp_path)]


def test_a_buffer_that_is_used_again_is_aligned(disk: DiskTier, tmp_path: Path, synced: list[bool]) -> None:
    memory = memory_tier()
    for seed in range(3):
        data = memory.buffer(CHUNK_BYTES)
        check(disk, data, seed)
        memory.hold(CHUNK_BYTES)
        memory.put(b"x", data)
        del data
        memory.drop(b"x")
        assert len(memory._spare) == 1
    assert synced == 3 * [bypasses(tmp_path)]


@pytest.mark.parametrize("size", [0, 1, 512, 4096 + 100, CHUNK_BYTES - 1])
def test_a_last_chunk_of_any_length_is_written_and_synced(disk: DiskTier, synced: list[bool], size: int) -> None:
    check(disk, memory_tier().buffer(size))
    assert len(synced) == 1


def test_a_chunk_in_memory_that_is_not_aligned_is_written_too(disk: DiskTier, synced: list[bool]) -> None:
    check(disk, memoryview(bytearray(CHUNK_BYTES + 1))[1:])
    assert len(synced) == 1


def test_a_short_write_goes_on_through_the_cache(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch, synced: list[bool]
) -> None:
    class Short(io.FileIO):
        sizes = iter((4096, 1000))

        def write(self, data: memoryview) -> int:  # type: ignore[override]
            return super().write(data[: next(self.sizes, None)])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode, **_: Short(path, mode))
        data = memory_tier().buffer(CHUNK_BYTES)
        digest = fill(data)
        disk.write(digest, data, sync=True)
    back = memoryview(bytearray(CHUNK_BYTES))
    disk.read(digest, back)
    assert back == data
    assert synced == [False]


def test_a_write_beyond_the_largest_file_leaves_no_file(disk: DiskTier) -> None:
    data = memory_tier().buffer(CHUNK_BYTES)
    digest = fill(data)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK_BYTES // 2 + 100, before[1]))
    try:
        with pytest.raises(DiskError, match="File too large"):
            disk.write(digest, data, sync=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*disk.found(), *(disk.folder / "partial").iterdir()]


def test_a_file_system_without_such_writes_gets_its_chunks_through_the_cache(
    tmp_path: Path, synced: list[bool]
) -> None:
    with mounted(tmp_path / "ramfs", "-t", "ramfs", "ramfs") as folder, opened(folder) as disk:
        check(disk, memory_tier().buffer(CHUNK_BYTES))
    assert synced == [False]


def test_a_full_disk_under_a_write_past_the_cache_leaves_no_file(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(5 * CHUNK_BYTES)
    if not (make := shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/sbin:/usr/sbin")):
        pytest.skip("no mkfs.ext4")
    subprocess.run([make, "-q", "-m", "0", str(image)], check=True, stdin=subprocess.DEVNULL)
    memory = memory_tier()
    with mounted(tmp_path / "ext4", "-o", "loop", str(image)) as folder, opened(folder) as disk:
        data, written = memory.buffer(CHUNK_BYTES), list[tuple[bytes, int]]()
        digest = b""
        with pytest.raises(DiskError) as caught:
            for seed in range(9):
                digest = fill(data, seed)
                disk.write(digest, data, sync=True)
                written.append((digest, CHUNK_BYTES))
        assert caught.value.full
        assert written
        assert sorted(disk.found()) == sorted(written)
        assert not [*(folder / "partial").iterdir()]
        disk.delete([written[0][0]])
        disk.write(digest, data, sync=True)
        disk.read(digest, memory.buffer(CHUNK_BYTES))
