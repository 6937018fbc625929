"""A group whose machine computes other bits than an equal machine is refused by name, and the others go on."""

from __future__ import annotations

import concurrent.futures
from functools import partial

import pytest
import torch

from keepstep.preflight import preflight
from keepstep.preflight.product import comparable_product
from keepstep.runtime.exits import PreflightExit
from keepstep_mesh.exit_codes import EXIT_PREFLIGHT
from tests.services.manager.groups import manager


def one_bit_wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product = left @ right
    product.view(torch.int32)[0, 0] ^= 1
    return product


def test_a_machine_that_computes_other_bits_than_an_equal_one_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, lighthouse: str
) -> None:
    def differing() -> PreflightExit:
        monkeypatch.setattr(preflight, "comparable_product", partial(comparable_product, multiply=one_bit_wrong))
        with manager(lighthouse, "bad", preflight=["builtin"]) as bad, pytest.raises(PreflightExit) as refused:
            bad.start_quorum()
            bad.should_commit()
        return refused.value

    with manager(lighthouse, "good", preflight=["builtin"]) as good, concurrent.futures.ThreadPoolExecutor(1) as other:
        good.start_quorum()
        assert good.should_commit()
        ends = other.submit(differing)
        while not ends.done():
            good.start_quorum()
            assert good.should_commit()
        refused = ends.result()
        good.start_quorum()
        assert good.should_commit()
    assert refused.code == EXIT_PREFLIGHT
    assert "the machine of bad at 127.0.0.1 computes another matrix product than that of good" in str(refused)
    assert f"torch {torch.__version__}, {torch.get_num_threads()} threads" in str(refused)
    assert "the job follows good" in str(refused)
