"""``keepstep inject``: bring one fault on one process of this machine."""

from __future__ import annotations

import signal
import sys

import click

from keepstep_chaos.injecting.elsewhere import INJECTABLE
from keepstep_cli.asking.options import Seconds


@click.command("inject", short_help="Inject one fault into a process of this machine.")
@click.argument("kind", type=click.Choice(INJECTABLE))
@click.option("--at", "address", required=True, metavar="HOST:PORT", help="Where the process listens.")
@click.option("--seconds", type=Seconds(), default=5.0, show_default=True, help="Duration of the fault, if it lasts.")
@click.option("--fill-shared-disks", is_flag=True, help="Fill a filesystem that others may use.")
def inject(kind: str, *, address: str, seconds: float, fill_shared_disks: bool) -> None:
    """Inject one fault into the process of this user that listens at an address of this machine.

    It does not ask first. `keepstep chaos --exec` runs this in containers, pods, and on other machines.

    Exit code: 0 the fault hit, and is undone, 1 it did not hit; the message has the reason.
    """
    import asyncio

    from keepstep_chaos.injecting.injection import InjectionError, Permissions, inject_at
    from keepstep_chaos.injecting.interruption import cancel_at_signals

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        cancel_at_signals(task)
        await inject_at(address, kind, seconds, Permissions(fill_shared_disks=fill_shared_disks))

    try:
        asyncio.run(run())
    except InjectionError as error:
        raise click.ClickException(f"{kind}: {error}") from error
    except asyncio.CancelledError:
        print("keepstep: interrupted; the fault was undone", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
