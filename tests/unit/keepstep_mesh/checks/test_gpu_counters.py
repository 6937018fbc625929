"""XID errors in a kernel log, and counters of GPUs."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from keepstep_mesh.checks import gpu_counters
from keepstep_mesh.checks.findings import Verdict
from keepstep_mesh.checks.gpu_counters import examine_gpus


def test_the_numbers_of_xid_errors_are_read_from_a_kernel_log(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "4,1,1,-;usb 1-1: new device\n"
        "4,2,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=python\n"
        "4,3,3,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
    )
    assert gpu_counters._xids(str(log)) == {2: 31, 3: 79}
    assert gpu_counters._xids(str(tmp_path / "missing")) is None


class Nvml(types.ModuleType):
    """The driver of a machine whose second GPU has fallen off the bus."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_MEM = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
    NVML_NVLINK_MAX_LINKS = 0
    shut_down = False

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut_down = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, _handle: int) -> str:  # noqa: N802
        return "GPU-0"

    def nvmlDeviceGetName(self, _handle: int) -> str:  # noqa: N802
        return "H200"


def test_a_gpu_that_has_fallen_off_the_bus_fails_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml = Nvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_counters, "Path", lambda _: tmp_path)
    first, second, _ = examine_gpus()
    assert first.verdict is Verdict.OK
    assert (second.check, second.verdict, second.found) == ("GPU 1", Verdict.FAIL, "NVML: GPU is lost")
    assert nvml.shut_down
