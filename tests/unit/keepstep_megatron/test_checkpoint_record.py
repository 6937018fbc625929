"""metadata.json names the backends of a complete checkpoint."""

from __future__ import annotations

import json

import pytest

from keepstep.sharded import (
    CheckpointingConfig,
    CheckpointingException,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)
from keepstep.sharded.core import load_config, parse_config


def test_a_record_is_read_back(tmp_path) -> None:
    config = CheckpointingConfig("torch_dist", common_backend_version=2)
    save_config(config, str(tmp_path))
    assert maybe_load_config(str(tmp_path)) == load_config(tmp_path) == config
    assert check_is_distributed_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metadata.json"]
    assert json.loads((tmp_path / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 2,
    }


def test_fields_of_a_later_version_are_ignored_and_absent_ones_have_defaults() -> None:
    assert parse_config('{"sharded_backend": "x", "later": 1}') == CheckpointingConfig("x", 1, "torch", 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ('{"sharded_backend": "torch_', "not JSON"),
        ("[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        ("[]", "expected an object"),
        ("{}", "'sharded_backend'"),
        ('{"sharded_backend": 1}', "'sharded_backend'"),
        ('{"sharded_backend": "x", "sharded_backend_version": "1"}', "sharded_backend_version is '1', expected int"),
        ('{"sharded_backend": "x", "common_backend_version": true}', "common_backend_version is True"),
        ('{"sharded_backend": "x", "common_backend": null}', "common_backend is None, expected str"),
    ],
)
def test_a_damaged_record_is_no_checkpoint_and_its_error_says_why(tmp_path, text, problem) -> None:
    (tmp_path / "metadata.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert maybe_load_config(tmp_path) is None
    assert not check_is_distributed_checkpoint(tmp_path)
    with pytest.raises(CheckpointingException, match=f"invalid metadata.json: .*{problem}"):
        load_config(tmp_path)


def test_a_folder_without_a_record_is_no_checkpoint(tmp_path) -> None:
    assert not check_is_distributed_checkpoint(tmp_path)
    assert not check_is_distributed_checkpoint(tmp_path / "absent")
    assert maybe_load_config("") is None
    with pytest.raises(CheckpointingException, match=r"is not a distributed checkpoint: it has no metadata"):
        load_config(tmp_path)


def test_a_record_of_many_megabytes_is_not_read(tmp_path) -> None:
    (tmp_path / "metadata.json").write_bytes(b" " * (1 << 20) + b" ")
    with pytest.raises(CheckpointingException, match="larger than 1048576 bytes"):
        load_config(tmp_path)
