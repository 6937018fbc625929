"""`keepstep doctor` against real services."""

from __future__ import annotations

import json
from pathlib import Path

from keepstep_cli.asking.rest import Lighthouse
from keepstep_cli.doctor.probes import examine
from keepstep_mesh.checks.findings import Verdict
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.security.tls import TlsFiles
from tests.services.cli.scene import keepstep
from tests.support.network.certificates import Authority
from tests.support.services.asking_group import Group
from tests.support.services.lighthouse_driver import eventually, lighthouse
from tests.support.services.relay_driver import relay

NOWHERE = "http://127.0.0.1:1"


async def test_services_clocks_and_packets_are_fine_and_a_group_that_cannot_be_reached_is_named() -> None:
    async with lighthouse() as one, relay(lighthouses=(one.address,)) as other:
        await eventually(lambda: other.is_registered)
        async with Group(one.address, name="r0") as group:
            await group.ask(info=MemberInfo(NOWHERE))
            found = await examine(Lighthouse(one.address, None), "job", TlsFiles())
        checks = {finding.check: finding for finding in found}
        for address in (f"lighthouse {one.address}", f"relay {other.address}"):
            assert checks[address].verdict is not Verdict.FAIL, checks[address]
        assert checks[f"clock of {other.address}"].verdict is Verdict.OK
        assert not [check for check in checks if check.startswith("large packets")]
        assert [finding.check for finding in found if finding.verdict is Verdict.FAIL] == [f"group r0 at {NOWHERE}"]


async def test_a_certificate_that_ends_soon_is_a_warning(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    for days, verdict in ((10, Verdict.WARN), (60, Verdict.OK)):
        cert = authority.certificate("localhost", "127.0.0.1", days=(-1, days))
        async with lighthouse(tls=TlsFiles(cert)) as one:
            found = await examine(Lighthouse(one.address, None, tls=authority.trusted()), "job", authority.trusted())
        (certificate,) = [finding for finding in found if finding.check == f"certificate of {one.address}"]
        assert (certificate.verdict, certificate.found) == (verdict, f"ends in {days}.0 days")


async def test_without_a_lighthouse_the_command_fails_and_still_checks_this_machine() -> None:
    said = await keepstep("doctor", "--lighthouse", NOWHERE, "--json")
    assert said.code == 1
    verdicts = {one["check"]: one["verdict"] for one in json.loads(said.out)}
    assert verdicts["lighthouse"] == "fail"
    assert {"versions", "open files", "own address"} <= verdicts.keys()
