"""A processor that computes wrong is found by its products."""

from __future__ import annotations

import pytest
import torch

from keepstep.preflight.product import SIZE, comparable_product, own_device, wrong_bytes

CPU = torch.device("cpu")


def one_bit_wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product = left @ right
    product.view(torch.int32)[SIZE // 2, 7] ^= 1
    return product


def reordered(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.flip(1) @ right.flip(0)


def test_a_product_of_whole_numbers_is_known_bit_for_bit_in_every_order() -> None:
    assert wrong_bytes(CPU) == 0
    assert wrong_bytes(CPU, reordered) == 0
    assert wrong_bytes(CPU, lambda left, right: (left.double() @ right.double()).float()) == 0


def test_one_wrong_bit_is_found() -> None:
    assert wrong_bytes(CPU, one_bit_wrong) == 1


def test_products_are_compared_by_their_bits_under_equal_conditions() -> None:
    own, _, digest = comparable_product(CPU).rpartition("=")
    assert comparable_product(CPU) == f"{own}={digest}"
    theirs, _, other = comparable_product(CPU, one_bit_wrong).rpartition("=")
    assert (theirs, len(other)) == (own, 16)
    assert other != digest
    assert f"torch {torch.__version__}, {torch.get_num_threads()} threads" in own


def test_another_number_of_threads_and_other_settings_of_libraries_are_other_conditions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = comparable_product(CPU).rpartition("=")[0]
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert comparable_product(CPU).rpartition("=")[0] != own


def test_bits_that_vary_from_run_to_run_are_not_compared() -> None:
    runs = iter((torch.matmul, one_bit_wrong, torch.matmul))

    def varying(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return next(runs)(left, right)

    assert comparable_product(CPU, varying) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_gpus_the_cpu_is_checked() -> None:
    assert own_device() == CPU
