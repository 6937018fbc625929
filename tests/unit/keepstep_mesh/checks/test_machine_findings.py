"""Verdicts on the measurements of a machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep_mesh.checks import findings
from keepstep_mesh.checks.findings import Finding, GpuFacts, Verdict

GPU = GpuFacts("GPU 0 (H200)", 0, remap_pending=False, remap_failed=False, links_down=0, bandwidth=4.8e12)


@pytest.mark.parametrize(
    ("finding", "verdict", "text"),
    [
        (findings.of_memory(1 << 30, 1 << 30), Verdict.OK, "1.0 GiB available"),
        (findings.of_memory(1 << 20, 1 << 30), Verdict.FAIL, "1.0 MiB available (at least 1.0 GiB)"),
        (findings.of_disk("/data", 5 << 30, 1 << 30), Verdict.OK, "5.0 GiB free"),
        (findings.of_disk("/data", 0, 1 << 30), Verdict.FAIL, "0 B free (at least 1.0 GiB)"),
        (findings.of_disk("/data", None, 1, "it may not be written"), Verdict.FAIL, "it may not be written"),
        (findings.of_rate("r1", 2048.0, 1024), Verdict.OK, "2.0 KiB/s"),
        (findings.of_rate("r1", 512.0, 1024), Verdict.FAIL, "512 B/s (at least 1.0 KiB/s)"),
        (findings.of_rate("r1", None, 1024, "no group is there"), Verdict.WARN, "not measured: no group is there"),
        (findings.of_command("true", 0, "", 60), Verdict.OK, "exit code 0"),
        (findings.of_command("x", 3, "the fan is off\n", 60), Verdict.FAIL, "exit code 3: the fan is off"),
        (findings.of_command("x", None, "", 60), Verdict.FAIL, "did not end within 60 s"),
        (findings.of_command("x", 1, "\x1b[31mred", 60), Verdict.FAIL, "exit code 1: \\x1b[31mred"),
        (findings.of_endpoint("http://h/", 204, ""), Verdict.OK, "204"),
        (findings.of_endpoint("http://h/", 302, ""), Verdict.FAIL, "status 302"),
        (findings.of_endpoint("http://h/", 503, "drained\n"), Verdict.FAIL, "status 503: drained"),
        (findings.of_endpoint("http://h/", None, "refused"), Verdict.FAIL, "no answer: refused"),
        (findings.of_product(0, "cpu"), Verdict.OK, "correct bit for bit"),
        (findings.of_product(1, "cpu"), Verdict.FAIL, "1 bytes are wrong"),
        (findings.of_clock("http://h", 9.0, 0.001), Verdict.FAIL, "9 s ahead of this machine"),
        (findings.of_xids(None), Verdict.OK, "not there: this user may not read the kernel log"),
        (findings.of_xids([13, 31]), Verdict.OK, "none of the hardware, 2 others"),
        (findings.of_xids([13, 79]), Verdict.FAIL, "79 (the GPU has fallen off the bus)"),
    ],
)
def test_each_measurement_has_its_verdict(finding: Finding, verdict: Verdict, text: str) -> None:
    assert (finding.verdict, finding.found) == (verdict, text)
    assert bool(finding.advice) == (verdict is Verdict.FAIL)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"uncorrected": 2}, "2 uncorrectable errors of its memory"),
        ({"remap_pending": True}, "rows of its memory wait for a reset to be remapped"),
        ({"remap_failed": True}, "a row of its memory could not be remapped"),
    ],
)
def test_each_error_of_a_gpu_fails_it(change: dict[str, object], text: str) -> None:
    (found,) = findings.of_gpu(replace(GPU, **change))
    assert (found.check, found.verdict, found.found) == ("GPU 0 (H200)", Verdict.FAIL, text)


def test_what_a_gpu_does_not_have_is_named() -> None:
    (whole,) = findings.of_gpu(GPU)
    assert (whole.verdict, whole.found) == (Verdict.OK, "memory of 4470.3 GiB/s, no errors")
    (some,) = findings.of_gpu(replace(GPU, links_down=3))
    assert (some.verdict, some.found) == (Verdict.WARN, "3 NVLinks are not active, memory of 4470.3 GiB/s, no errors")
    (bare,) = findings.of_gpu(GpuFacts("GPU 1 (old)"))
    assert bare.verdict is Verdict.OK
    assert bare.found == "not there: ECC counters, remapped rows, NVLink, memory bandwidth"


def test_the_sentence_has_only_what_failed_and_what_to_do() -> None:
    found = [findings.of_memory(1, 2), findings.of_product(0, "cpu"), findings.of_command("x", 3, "", 60)]
    assert findings.sentence(found) == (
        "memory: 1 B available (at least 2 B); end other programs, or raise the limit of the container; "
        "command x: exit code 3; repair what the command checks"
    )
    assert not findings.sentence([findings.of_rate("r1", None, 0, "why")])
