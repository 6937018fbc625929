"""Names that a shell may complete: jobs and replica groups, asked of the lighthouse.

The request takes at most ``COMPLETION_SECONDS``. Without an answer nothing is offered and nothing is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from keepstep_cli.asking.defaults import TLS_FILES

COMPLETION_SECONDS = 1.0


def job_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return _names(context, incomplete, lambda answer: [one["job"] for one in answer["jobs"]], "jobs")


def replica_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Stable names: a shell breaks words at the colon of an incarnation."""
    path = ("jobs", context.params.get("job") or "default", "replicas")
    return _names(context, incomplete, lambda answer: [one["name"] for one in answer["replicas"]], *path)


def refused_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Those that a readmission is for."""
    path = ("jobs", context.params.get("job") or "default")

    from keepstep_mesh.protocol.names import name_of

    def names(job: Any) -> list[str]:
        return [ban["target"] for ban in job["bans"]] + [name_of(one) for one in job["evicted"]]

    return _names(context, incomplete, names, *path)


def _names(context: click.Context, incomplete: str, names: Callable[[Any], Iterable[str]], *path: str) -> list[str]:
    from keepstep_cli.asking.rest import Lighthouse, read_token, run
    from keepstep_mesh.security.tls import tls_of_client

    try:
        token = read_token(context.params.get("token_file"))
        tls = tls_of_client({name: context.params.get(name) for name in TLS_FILES})
        lighthouse = Lighthouse(context.params.get("addresses"), token, tls, timeout=COMPLETION_SECONDS)
        answer = run(lighthouse.get(*path))
    except click.ClickException:
        return []
    return sorted({name for name in names(answer) if name.startswith(incomplete)})
