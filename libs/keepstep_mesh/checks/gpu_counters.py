"""Read the error counters of GPUs from NVML (package ``nvidia-ml-py``), and XID errors from the kernel log."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
from pathlib import Path
from typing import Any

from keepstep_mesh.checks.findings import Finding, GpuFacts, Verdict, of_gpu, of_xids

_XID = re.compile(rb"^\d+,(\d+),[^;\n]*;.*NVRM: Xid \([^)]*\): (\d+)", re.MULTILINE)
MAX_RECORDS = 100_000
"""Of the kernel log, so that a log that grows while it is read ends."""


def examine_gpus(uuids: tuple[str, ...] | None = None) -> list[Finding]:
    """Return the findings of the GPUs of this machine; empty without an NVIDIA driver.

    Args:
        uuids: of the GPUs that count, as torch names them; None: all.
    """
    if not Path("/proc/driver/nvidia").exists():
        return []
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        found = "not there: install nvidia-ml-py to read ECC, NVLink, and memory bandwidth"
        return [Finding("GPU counters", Verdict.OK, found), of_xids(_codes())]
    except Exception as error:  # noqa: BLE001  its errors are classes of its own
        return [Finding("GPU counters", Verdict.FAIL, f"NVML: {error}", "reload the driver, or take the machine out")]
    found_all: list[Finding] = []
    name = "GPU counters"
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            name = f"GPU {index}"
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            if uuids is None or uuid.removeprefix("GPU-") in uuids:
                found_all += of_gpu(_facts(nvml, handle, index))
    except Exception as error:  # noqa: BLE001  as above: a GPU that has fallen off the bus has no handle
        found_all.append(Finding(name, Verdict.FAIL, f"NVML: {error}", "reset the GPU, or take the machine out"))
    finally:
        nvml.nvmlShutdown()
    return [*found_all, of_xids(_codes())]


def _facts(nvml: Any, handle: Any, index: int) -> GpuFacts:
    def asked(question: str, *arguments: Any) -> Any:
        """Return the answer of NVML; None: this GPU or driver has none."""
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, f"nvmlDeviceGet{question}")(handle, *arguments)
        return None

    rows = asked("RemappedRows")
    clock = asked("MaxClockInfo", nvml.NVML_CLOCK_MEM)
    width = asked("MemoryBusWidth")
    links = [
        state
        for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))
        if (state := asked("NvLinkState", link)) is not None
    ]
    return GpuFacts(
        name=f"GPU {index} ({_text(nvml.nvmlDeviceGetName(handle))})",
        uncorrected=asked("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        links_down=sum(not one for one in links) if any(links) else None,  # a GPU without a bridge has all of them off
        bandwidth=None if clock is None or width is None else clock * 1e6 * width / 8 * 2,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _codes() -> list[int] | None:
    found = _xids()
    return None if found is None else list(found.values())


def xid_errors() -> tuple[dict[int, int], str]:
    """Return the XID errors of the kernel log, oldest first, and whether they could be read, a sentence.

    Each has the number of its record as key: the log drops its oldest records, and numbers never come back.
    """
    if not Path("/proc/driver/nvidia").exists():
        return {}, "not there: no NVIDIA driver"
    found = _xids()
    if found is None:
        return {}, "not there: this user may not read the kernel log"
    return found, "read from the kernel log"


def _xids(log: str = "/dev/kmsg") -> dict[int, int] | None:
    """Return the XID errors of the kernel log by the number of the record; None: this user may not read it."""
    try:
        file = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found: dict[int, int] = {}
    try:
        for _ in range(MAX_RECORDS):
            try:
                record = os.read(file, 8192)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # newer records have replaced this one
                    continue
                return None
            if not record:
                break
            found |= {int(number): int(code) for number, code in _XID.findall(record)}
    finally:
        os.close(file)
    return found
