"""``keepstep doctor``: check a mesh from this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from keepstep_cli.asking.job_link import show_json
from keepstep_cli.asking.options import client_options

if TYPE_CHECKING:
    from keepstep_mesh.security.tls import TlsFiles

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command(short_help="Check services, clocks, network, and versions.")
@client_options
def doctor(*, addresses: str | None, token_file: Path | None, tls: TlsFiles, job: str, as_json: bool) -> None:
    """Check, from this machine: services, clocks, large packets, MTU, ports, reach of groups, versions, and GPUs.

    Run it on each machine of the mesh. Exit code: 0 nothing failed (there may be warnings), 1 a check failed.
    """
    from rich.markup import escape

    from keepstep_cli.asking.rest import Lighthouse, read_token, run
    from keepstep_cli.asking.tables import console, table_of
    from keepstep_cli.doctor.probes import examine
    from keepstep_mesh.checks.findings import Verdict

    found = run(examine(Lighthouse(addresses, read_token(token_file), tls), job, tls))
    failed = [one for one in found if one.verdict is Verdict.FAIL]
    if as_json:
        show_json([{**asdict(one), "verdict": one.verdict.value} for one in found])
    else:
        table = table_of("check", "", "found", "do", fold={"check", "found", "do"})
        for one in found:
            word = one.verdict.value
            table.add_row(escape(one.check), f"[{STYLES[word]}]{word}[/]", escape(one.found), escape(one.advice))
        console().print(table)
    if failed:
        raise SystemExit(1)
