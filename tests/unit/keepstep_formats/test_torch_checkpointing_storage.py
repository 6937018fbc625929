"""torch_checkpointing with its files at a relay."""

from __future__ import annotations

import asyncio
import io
import pickle
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.services.relay_driver import relay

torch_checkpointing = pytest.importorskip("torch_checkpointing", reason="torch_checkpointing is not installed")

from keepstep.checkpoint.torch_checkpointing_storage import RelayStorageConfig  # noqa: E402


def config(address: str) -> RelayStorageConfig:
    return RelayStorageConfig(f"{address}/v1/jobs/j/checkpoints", folder="/ckpt", kind="live", timeout_seconds=30)


@contextmanager
def storage(address: str):
    one = pickle.loads(pickle.dumps(config(address))).create_storage()  # an object of this test
    try:
        yield one
    finally:
        one.close()


async def test_a_manager_saves_and_loads_at_a_relay():
    from torch_checkpointing import CheckpointManager

    async with relay() as at:

        def check() -> None:
            settings = CheckpointManager.Config.with_sync_save()
            settings.storage_config = config(at.address)
            manager = settings.build()
            saved = {"model": {"w": torch.arange(1000.0)}, "step": 7}
            try:
                manager.save("/ckpt/step-7", saved)
                loaded = manager.load("/ckpt/step-7", into={"model": {"w": torch.zeros(1000)}, "step": 0})
            finally:
                manager.close()
            assert loaded["step"] == 7
            assert loaded["model"]["w"].equal(saved["model"]["w"])
            with storage(at.address) as one:
                assert one.ls(Path("/ckpt")) == ["step-7"]
                assert one.isdir(Path("/ckpt/step-7"))
                assert not one.exists(Path("/ckpt/tmp_step-7"))

        await asyncio.to_thread(check)


async def test_streams_paths_and_renames_are_those_of_a_file_system():
    async with relay() as at:

        def check() -> None:
            with storage(at.address) as one:
                folder = Path("/ckpt/tmp_a")
                one.mkdir(folder / "sub")
                with one.stream_write(folder / "sub" / "f") as stream:
                    stream.write(b"0123")
                    stream.write(memoryview(b"456789"))
                with pytest.raises(ValueError, match="broken"), one.stream_write(folder / "g") as stream:
                    stream.write(b"half")
                    raise ValueError("broken")
                assert not one.exists(folder / "g")
                one.write(folder / "h", b"x")
                one.rename(folder / "h", folder / "i")
                assert sorted(one.ls(folder)) == ["i", "sub"]
                assert one.ls(folder / "sub") == ["f"]
                assert one.glob(str(folder / "s*")) == [str(folder / "sub")]
                assert (one.getsize(folder / "sub" / "f"), one.read(folder / "sub" / "f")) == (10, b"0123456789")
                with one.stream_read(folder / "sub" / "f") as reading:
                    assert reading.seek(-3, io.SEEK_END) == 7
                    assert reading.read(2) == b"78"
                one.rename(folder, Path("/ckpt/a"), is_directory=True)
                assert one.read(Path("/ckpt/a/sub/f")) == b"0123456789"
                assert not one.exists(folder)
                one.write(folder / "h", b"x")
                with pytest.raises(OSError, match="a has files already"):
                    one.rename(folder, Path("/ckpt/a"), is_directory=True)
                with pytest.raises(OSError, match="cannot rename"):
                    one.rename(folder / "h", Path("/ckpt/a"))
                with pytest.raises(FileNotFoundError):
                    one.read(Path("/ckpt/a/nothing"))
                with pytest.raises(OSError, match="expected a checkpoint below /ckpt"):
                    one.exists(Path("/elsewhere/a"))
                assert one.remap_path(Path("/ckpt/a")) == f"{at.address}/v1/jobs/j/checkpoints/a"
                one.rmdir(folder)
                assert not one.exists(folder)

        await asyncio.to_thread(check)
