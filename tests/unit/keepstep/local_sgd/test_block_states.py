"""The states that the blocks of LocalSGD and DiLoCo keep, save and load."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from keepstep.collectives.codecs import TopK, TwoBit
from keepstep.local_sgd import DiLoCo
from tests.unit.keepstep.local_sgd.groups import SHAPE, Groups, alone, make, module_of, train, weights


def test_a_state_is_loaded_before_the_block_and_training_goes_on_as_before() -> None:
    def run(*, interrupted: bool) -> list[torch.Tensor]:
        model = module_of(SHAPE)
        kept: list[Any] = []
        for part in (range(7), range(7, 12)) if interrupted else (range(12),):
            manager = alone()
            inner = torch.optim.AdamW(model.parameters(), lr=0.1)
            outer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            diloco = DiLoCo(manager, [model], inner, outer, 4, fragment_update_alpha=0.5)
            if kept:
                inner.load_state_dict(kept[0])
                diloco.load_state_dict(kept[1])
            with diloco:
                for step in part:
                    train(inner, 0, step)
                kept = [inner.state_dict(), diloco.state_dict()]
        return weights(model)

    torch.testing.assert_close(run(interrupted=True), run(interrupted=False), rtol=0, atol=0)


def test_a_state_of_other_fragments_is_refused() -> None:
    _, inner, diloco = make(alone(), sync_every=4, fragment_sync_delay=2)
    saved = diloco.state_dict()
    with pytest.raises(ValueError, match="the state has 0 fragments, and this DiLoCo 1"):
        diloco.load_state_dict({**saved, "fragments": []})
    _, _, other = make(alone(), module_of([((2,), torch.float32)] * 2))
    with pytest.raises(ValueError, match=r"the state has the parameters p0, p1, and this fragment p0"):
        diloco.load_state_dict(other.state_dict())
    _, _, smaller = make(alone(), module_of([((1, 2), torch.float32)]))
    with pytest.raises(
        ValueError, match=r"parameter 'p0' of the state has shape \(1, 2\), and that of this fragment \(2, 2"
    ):
        diloco.load_state_dict(smaller.state_dict())
    with diloco:
        for step in range(3):
            train(inner, 0, step)
        with pytest.raises(RuntimeError, match="load the state before the block is entered"):
            diloco.load_state_dict(saved)


def test_a_state_with_another_codec_is_refused() -> None:
    _, _, one = make(alone(), codec=TopK(0.5))
    _, _, other = make(alone(), codec=TwoBit())
    with pytest.raises(ValueError, match=r"codec 'top-k\(2048 of 4096\)', and this group uses 'two-bit'"):
        other.load_state_dict(one.state_dict())
    _, inner, plain = make(alone())
    with plain:
        train(inner, 0, 0)
    with pytest.raises(ValueError, match=r"the state is of codec None, and this group uses 'two-bit'"):
        other.load_state_dict(plain.state_dict())
    assert other.state_dict()["position"] == 0, "nothing was loaded"


def test_copies_of_parameters_on_the_cpu_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory costs a CUDA context."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, _, diloco = make(alone(), pin_memory=True)
    assert not diloco.state_dict()["fragments"][0]["original_parameters"]["p0"].is_pinned()


def test_a_group_keeps_its_error_feedback_in_its_own_checkpoint_and_loses_it_in_a_heal() -> None:
    """In any other group it would be sent a second time."""
    key, left = "StreamingDiLoCoFragment_0", torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    codec = TwoBit()
    codec.load_own_state_dict({"errors": {key: [left]}})
    _, _, diloco = make(alone(), codec=codec)
    file = io.BytesIO()
    torch.save(diloco.state_dict(), file)

    def loaded(manager: Any) -> TwoBit:
        codec = TwoBit()
        file.seek(0)
        make(manager, codec=codec)[2].load_state_dict(torch.load(file, weights_only=True))
        return codec

    manager = alone()
    again = loaded(manager)
    torch.testing.assert_close(again.error(key), [left], rtol=0, atol=0)
    assert loaded(Groups(2).members[1]).error(key) == []
    load, save = manager.states["DiLoCo"]
    load(save())
    assert again.error(key) == []
