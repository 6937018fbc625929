"""Show an answer once, or again and again until Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import click

from keepstep_cli.errors import Unreachable

Command = TypeVar("Command", bound=Callable[..., object])
WATCH_SECONDS = 1.0


def watch_option(command: Command) -> Command:
    return click.option("--watch", "-w", is_flag=True, help="Update every second, until Ctrl-C.")(command)


def wide_option(command: Command) -> Command:
    return click.option("--output", "-o", type=click.Choice(["wide"]), help="wide: all columns.")(command)


def show(fetch: Callable[[], Callable[[], None]], *, watch: bool) -> None:
    """Fetch and print once, or every ``WATCH_SECONDS`` until Ctrl-C.

    A terminal is cleared before each update. While no lighthouse answers, a watch shows that, and goes on.

    Args:
        fetch: asks, and returns what prints the answer.
        watch: whether to go on.
    """
    if not watch:
        fetch()()
        return
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                draw = fetch()
            except Unreachable as error:
                draw = error.show
            if sys.stdout.isatty():
                click.clear()
            draw()
            sys.stdout.flush()
            time.sleep(WATCH_SECONDS)  # the interval of the display
