"""Which GPUs each replica group of `keepstep run` sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep_cli.running.gpus import advice, divide, variable_of, visible_gpus
from keepstep_cli.running.ranks import JobSpec, rank_environment


def test_without_the_variable_the_device_files_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({}, tmp_path / "missing") == ()


@pytest.mark.parametrize(
    ("given", "found"),
    [("2,3", ("2", "3")), ("", ()), ("-1", ()), ("0,-1,1", ("0",)), (" GPU-a , MIG-b", ("GPU-a", "MIG-b"))],
)
def test_the_variable_decides_as_it_does_for_cuda(given: str, found: tuple[str, ...], tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": given}, tmp_path) == found


def test_gpus_of_amd_are_counted_and_divided_by_the_variable_that_rocm_reads(tmp_path: Path) -> None:
    for node, gpu in enumerate(("0", "30112", "41882", "9301")):  # a CPU is 0
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "gpu_id").write_text(f"{gpu}\n")

    def seen(**variables: str) -> tuple[str, tuple[str, ...]]:
        return variable_of(variables), visible_gpus(variables, tmp_path / "no NVIDIA", tmp_path)

    assert seen() == ("CUDA_VISIBLE_DEVICES", ("0", "1", "2"))
    assert seen(ROCR_VISIBLE_DEVICES="2,3") == ("HIP_VISIBLE_DEVICES", ("0", "1")), "ROCm counts what it hides first"
    assert seen(HIP_VISIBLE_DEVICES="2", CUDA_VISIBLE_DEVICES="0,1") == ("HIP_VISIBLE_DEVICES", ("2",))
    spec = JobSpec(("true",), 2, 1, "http://l:1", "job", "run", 0, gpus=("0", "1"))
    ranks = [
        rank_environment(spec, one, 0, restart=0, master_port=1, base={"HIP_VISIBLE_DEVICES": "0,1"}) for one in (0, 1)
    ]
    assert [one["HIP_VISIBLE_DEVICES"] for one in ranks] == ["0", "1"]


def test_groups_get_different_gpus() -> None:
    assert divide(("4", "5", "6", "7", "8"), groups=2, each=2) == ["4,5", "6,7"]


def test_too_few_gpus_are_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"2 groups with 2 GPUs each need 4 GPUs; this machine shows 3 \(0, 1, 2\)"):
        divide(("0", "1", "2"), groups=2, each=2)
    with pytest.raises(ValueError, match="this machine shows no GPU"):
        divide((), groups=1, each=1)


def test_groups_that_share_gpus_get_a_warning_with_the_flag() -> None:
    assert advice((), 4) is None
    assert advice(("0",), 1) is None
    assert "--gpus-per-replica 2 " in str(advice(("0", "1", "2", "3"), 2))
    assert "--gpus-per-replica" not in str(advice(("0",), 2))


def test_each_rank_of_a_group_sees_the_gpus_of_its_group() -> None:
    spec = JobSpec(("true",), 2, 2, "http://l:1", "job", "run", 0, gpus=("0,1", "2,3"), first_group=4)
    seen = [
        rank_environment(spec, group, rank, restart=0, master_port=1, base={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
        for group in (0, 1)
        for rank in (0, 1)
    ]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen] == ["0,1", "0,1", "2,3", "2,3"]
