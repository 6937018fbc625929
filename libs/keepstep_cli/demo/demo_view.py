"""Show the demo: a live table on a terminal, plain lines elsewhere, and the table at the end."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keepstep_cli.demo.demo_story import State, Story

PLAIN_INTERVAL_SECONDS = 2.0
STYLES = {
    State.STARTING: "cyan",
    State.HEALING: "yellow",
    State.TRAINING: "green",
    State.DOWN: "bold red",
    State.FINISHED: "bold green",
}


class View(Protocol):
    def show(self, story: Story) -> None:
        """Update the view; called many times a second."""

    def close(self, story: Story) -> None:
        """Show the final state."""


class LiveView:
    """A live table on a terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, story: Story) -> None:
        self._live.update(_picture(story), refresh=True)

    def close(self, story: Story) -> None:
        self.show(story)
        self._live.stop()


class PlainView:
    """One line for each event, and one every other second."""

    def __init__(self) -> None:
        self._told = 0
        self._next = time.monotonic() + PLAIN_INTERVAL_SECONDS

    def show(self, story: Story) -> None:
        for line in story.happenings[self._told :]:
            print(line)
        self._told = len(story.happenings)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PLAIN_INTERVAL_SECONDS
            losses = [one.loss for one in story.groups.values() if one.loss is not None]
            loss = f", loss {min(losses):.4f}" if losses else ""
            groups = ", ".join(f"{name} {one.state.value}" for name, one in story.groups.items())
            print(f"          step {story.step}{loss}; {groups}")
        sys.stdout.flush()

    def close(self, story: Story) -> None:
        self.show(story)


def make_view(console: Console) -> View:
    return LiveView(console) if console.is_terminal else PlainView()


def _picture(story: Story) -> Group:
    table = Table(
        title=f"step {story.step}, quorum {story.quorum_id}: {story.participants} of {len(story.groups)} groups"
    )
    for column in ("group", "state", "step", "loss", "restarts"):
        table.add_column(column, justify="left" if column in {"group", "state"} else "right", min_width=9)
    for name, one in story.groups.items():
        table.add_row(
            name,
            Text(one.state.value, STYLES[one.state]),
            str(one.step),
            "" if one.loss is None else f"{one.loss:.4f}",
            str(one.restarts),
        )
    return Group(table, *(Text(line) for line in story.happenings[-12:]))


def final_table(summary: dict[str, Any]) -> Table:
    """Return the table of ``summary`` (``Story.summary``)."""

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    waits = summary["seconds_from_kill_to_next_commit"]
    accuracies = [value for value in summary["test_accuracy"].values() if value is not None]
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("steps committed", str(summary["steps_committed"]))
    table.add_row("kills survived", f"{summary['kills_survived']} of {summary['kills']}")
    table.add_row("from kill to next commit, p50", seconds(waits["p50"]))
    table.add_row("from kill to next commit, max", seconds(waits["max"]))
    table.add_row("killed group back after, p50", seconds(summary["seconds_from_kill_until_the_group_is_back"]["p50"]))
    table.add_row("bytes healed", f"{summary['bytes_healed']:,}")
    table.add_row("test accuracy", f"{min(accuracies):.1%}" if accuracies else "-")
    same = summary["weights_bit_identical"]
    table.add_row("weights bit-identical", Text("yes", "bold green") if same else Text("NO", "bold red"))
    return table
