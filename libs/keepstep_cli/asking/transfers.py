"""Collect and show transfers: heals from the lighthouse, uploads from each relay."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any

from click import ClickException
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar

from keepstep_cli.asking.rest import FOLLOW_PATIENCE_SECONDS, Lighthouse
from keepstep_cli.asking.tables import console, short, table_of
from keepstep_cli.errors import Refused
from keepstep_mesh.text import bytes_text, seconds_text

RELAY_ANSWER_SECONDS = 3.0
"""Timeout of a relay; the table names relays that do not answer."""
BAR_WIDTH = 16
DONE = ("part", "committed")
"""States of checkpoints to which nothing more comes."""
WIDE_ENOUGH = 108
"""Columns of a terminal that has room for bars."""

Found = dict[str, Any]


async def look(lighthouse: Lighthouse, job: str) -> Found:
    """Return the current heals and uploads of ``job``. Raises the errors of the lighthouse's client."""
    heals = (await lighthouse.get("jobs", job, "transfers"))["heals"]
    services = (await lighthouse.get("cluster"))["services"]
    relays = [{"name": one["name"], "address": one["address"]} for one in services if one["kind"] == "relay"]
    answers = await asyncio.gather(*(_uploads(lighthouse, job, relay) for relay in relays))
    return {"job": job, "heals": heals, "uploads": [one for some in answers for one in some], "relays": relays}


async def _uploads(lighthouse: Lighthouse, job: str, relay: Found) -> list[Found]:
    """Record in ``relay`` why it did not answer."""
    relay["trouble"] = None
    try:
        answer = await lighthouse.relay(relay["address"], RELAY_ANSWER_SECONDS).checkpoints(job)
    except ClickException as error:
        lines = error.message.splitlines()
        relay["trouble"] = next((line.strip() for line in lines if relay["address"] in line), lines[0])
        return []
    return [_upload(relay["name"], one) for one in answer["checkpoints"] if one["state"] not in DONE]


def _upload(relay: str, checkpoint: Found) -> Found:
    lacking, rate = checkpoint["lacking_bytes"], checkpoint["bytes_per_second"]
    known = checkpoint["state"] != "begun"  # else the manifest of some rank is not there
    return {
        "relay": relay,
        **{name: checkpoint[name] for name in ("id", "step", "kind", "state", "begun")},
        "bytes_done": checkpoint["bytes"] - lacking,
        "bytes_total": checkpoint["bytes"] if known else 0,
        "bytes_per_second": rate,
        "seconds_left": lacking / rate if known and rate >= 1 else None,
    }


async def follow_transfers(lighthouse: Lighthouse, job: str, told: Callable[[str], None], *, as_json: bool) -> None:
    """Show transfers until cancelled, or until no lighthouse has answered for ``FOLLOW_PATIENCE_SECONDS``.

    Waits for a job that does not exist yet. ``told`` receives messages about failures.
    """
    answered, waits = -math.inf, False
    with ExitStack() as stack:
        show = print_json if as_json else _shower(stack)
        while True:
            try:
                found = await look(lighthouse, job)
            except ClickException as error:
                if isinstance(error, Refused) and error.status == HTTPStatus.NOT_FOUND:
                    answered = time.monotonic()
                elif time.monotonic() - answered > FOLLOW_PATIENCE_SECONDS:
                    raise
                if not waits:
                    waits = True
                    told(f"{error.message.splitlines()[0]}; asking again")
            else:
                answered, waits = time.monotonic(), False
                show(found)
            await asyncio.sleep(1.0)


def print_json(found: Found) -> None:
    print(json.dumps(found), flush=True)


def _shower(stack: ExitStack) -> Callable[[Found], None]:
    """Show a table in place on a terminal; elsewhere print each table that differs from the last."""
    if sys.stdout.isatty():
        live = stack.enter_context(Live(auto_refresh=False, console=console()))
        return lambda found: live.update(_picture(found, live.console), refresh=True)
    last: Found = {}

    def show(found: Found) -> None:
        nonlocal last
        if found != last:
            last = found
            show_transfers(found)
            sys.stdout.flush()

    return show


def show_transfers(found: Found) -> None:
    shown_on = console()
    shown_on.print(_picture(found, shown_on))


def _picture(found: Found, shown_on: Console) -> Group:
    bars = shown_on.is_terminal and shown_on.width >= WIDE_ENOUGH
    parts: list[RenderableType] = []
    if found["heals"]:
        names = ("replica", "step", "from", "via")
        rows = [
            (short(one["replica_id"]), str(one["step"]), short(one["source"]) or "-", one["via"] or "-", one)
            for one in found["heals"]
        ]
        parts += ["heals", _table(names, rows, bars=bars)]
    if found["uploads"]:
        names = ("relay", "checkpoint", "step", "state")
        rows = [(one["relay"], one["id"], str(one["step"]), one["state"], one) for one in found["uploads"]]
        parts += ["uploads", _table(names, rows, bars=bars)]
    if not parts:
        relays = ", ".join(one["name"] for one in found["relays"] if not one["trouble"])
        none = "no relay answers" if found["relays"] else "no relay is registered"
        uploads = f"no upload to {relays}" if relays else none
        parts.append(escape(f"nothing moves: no heal in job {found['job']}, {uploads}"))
    parts += [escape(f"relay {one['name']}: {one['trouble']}") for one in found["relays"] if one["trouble"]]
    return Group(*parts)


def _table(names: tuple[str, ...], rows: list[tuple[Any, ...]], *, bars: bool) -> RenderableType:
    """Return a table. A row has a cell for each name, and the transfer that the other columns show."""
    table = table_of(*names, *(["progress"] if bars else []), "done", "rate", "left", fold={names[2], names[3]})
    for *cells, one in rows:
        done, total = one["bytes_done"], one["bytes_total"]
        bar = [ProgressBar(total, done, width=BAR_WIDTH) if total else ""] if bars else []
        share = f"{done / total:.0%} of {bytes_text(total)}" if total else bytes_text(done)
        rate, left = f"{bytes_text(one['bytes_per_second'])}/s", seconds_text(one["seconds_left"])
        table.add_row(*map(escape, cells), *bar, share, rate, left)
    return table
