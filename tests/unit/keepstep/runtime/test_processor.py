"""The kind of processor, as a group tells it to the lighthouse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keepstep.runtime.processor import processor


@pytest.mark.skipif(bool(torch.version.cuda), reason="this torch computes with GPUs")
def test_a_process_without_a_gpu_names_its_cpu():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    assert processor() in (models or {"unknown processor"})
