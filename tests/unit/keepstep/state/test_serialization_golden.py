"""The format does not change unnoticed.

When it has to change: raise ``manifest.VERSION``, describe the new one in docs/checkpoint-format.md, and write
the files again with ``python tests/unit/keepstep/state/test_serialization_golden.py``.
"""

from __future__ import annotations

import datetime as dt
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

from keepstep.state.state_bytes import load_state, save_state
from keepstep.state.state_manifest import read_manifest
from keepstep_mesh.protocol.manifest import Origin

GOLDEN = Path(__file__).parents[3] / "support" / "checkpoints" / "golden"
ORIGIN = Origin("checkpoint-1", "job", 12, 3, "r0")


def state():
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return {
        "model": OrderedDict(weight=weight, tied=weight.t(), bias=torch.arange(4).to(torch.bfloat16)),
        "many": [torch.tensor(True), torch.empty(0, 2), torch.arange(10)[::3], torch.tensor([1 + 2j])],
        1: (None, True, -5, 2.5, "text", b"bytes", 1 << 100, 1j),
        ("a", 2): {torch.Size([3]), torch.float8_e4m3fn, torch.device("cuda:1")},
        "numpy": [np.arange(3, dtype=">i2"), np.array("x"), np.float16(0.5)],
        "time": [dt.timedelta(1, 2, 3), dt.datetime(2026, 11, 20, 1, 2, 3, 4, dt.UTC), dt.date(2026, 1, 2), dt.time(5)],
        "long": bytes(range(256)) * 20,
    }


def test_a_state_is_stored_as_the_golden_files_have_it():
    manifest, pack = save_state(state(), ORIGIN)
    assert bytes(pack) == (GOLDEN / "state-v1.pack").read_bytes()
    assert manifest == (GOLDEN / "state-v1.manifest").read_bytes()


def test_the_golden_files_are_read_as_the_state_that_they_hold():
    manifest, pack = ((GOLDEN / f"state-v1.{part}").read_bytes() for part in ("manifest", "pack"))
    assert read_manifest(manifest).origin == ORIGIN
    loaded, expected = load_state(manifest, pack), state()
    assert loaded[1] == expected[1]
    assert loaded[("a", 2)] == expected[("a", 2)]
    assert loaded["time"] == expected["time"]
    assert loaded["long"] == expected["long"]
    assert type(loaded["model"]) is OrderedDict
    assert loaded["model"]["tied"].data_ptr() == loaded["model"]["weight"].data_ptr()
    for name, tensor in expected["model"].items():
        assert loaded["model"][name].equal(tensor)
    assert all(
        one.dtype == two.dtype and one.equal(two) for one, two in zip(loaded["many"], expected["many"], strict=True)
    )
    for one, two in zip(loaded["numpy"], expected["numpy"], strict=True):
        assert one.dtype == two.dtype
        assert np.array_equal(one, two)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    manifest, pack = save_state(state(), ORIGIN)
    (GOLDEN / "state-v1.manifest").write_bytes(manifest)
    (GOLDEN / "state-v1.pack").write_bytes(pack)
