"""Events and actions of ``supervisor``, and the limits of its restarts. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from keepstep_mesh.net.backoff import Backoff

MAX_RESTARTS = 100
RESTART_BACKOFF = Backoff(first=0.1, most=30.0)
REFUSED_PAUSE = 60.0
RESTARTED = "an order to restart"


@dataclass(frozen=True, slots=True)
class Restarts:
    """Limits and delays of restarts, in seconds."""

    max_restarts: int = MAX_RESTARTS
    backoff: Backoff = RESTART_BACKOFF
    ran_well: float = 10.0
    """Shortest life after which a group restarts at once."""
    grace: float = 10.0
    """Time from SIGTERM to SIGKILL."""
    ban_check: float = 5.0
    script_errors: int = 3
    """Errors of the script in a row, before the job's first step, after which a group is given up."""
    refused_pause: float = REFUSED_PAUSE
    """Pause before the restart of a group whose machine failed its checks. It doubles with each time in a row."""
    refused_most: float = 3600.0
    """Longest such pause."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    name: str
    ranks: int = 1
    service: bool = False


# ---- events


@dataclass(frozen=True, slots=True)
class Begin:
    """The first event."""


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank ended. ``code``: negative for a signal. ``hopeless``: it did not start, and never will."""

    group: str
    rank: int
    code: int
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """A request to end the job. The exit code is 128 + ``signum``."""

    signum: int = signal.SIGTERM


@dataclass(frozen=True, slots=True)
class BanLearned:
    """Answer to ``AskBan``: seconds until the ban ends; 0: not banned; None: no lighthouse answered.

    ``name``: the name of the group at the lighthouse, if it differs.
    """

    group: str
    seconds_left: float | None
    name: str = ""


@dataclass(frozen=True, slots=True)
class OrderRestart:
    """A request to restart a group, in whatever phase it is."""

    group: str


@dataclass(frozen=True, slots=True)
class JobLearned:
    """Answer to ``AskJob``.

    ``finished``: step at which the job finished; 0: not finished, or no lighthouse answered. ``step``: that the job
    has reached; None: no lighthouse answered.
    """

    group: str
    finished: int
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline has passed. At any other time it has no effect."""


Event = Begin | RankExited | BanLearned | JobLearned | Stop | OrderRestart | Tick

# ---- actions


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Start all ranks. ``restart`` is 0 the first time."""

    group: str
    restart: int


@dataclass(frozen=True, slots=True)
class SignalGroup:
    """Send a signal to the ranks that still run."""

    group: str
    signum: int


@dataclass(frozen=True, slots=True)
class AskBan:
    """Ask the lighthouse whether the name of this group is banned."""

    group: str


@dataclass(frozen=True, slots=True)
class AskJob:
    """Ask the lighthouse which step the job has reached, and whether it is finished."""

    group: str


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """All ranks of a group have ended, not all of them well.

    ``ranks``: rank and exit code, in the order of their ends. ``stopped_by``: why the supervisor ended it, the name of
    a signal or ``RESTARTED``; empty: it ended by itself.
    """

    group: str
    ranks: tuple[tuple[int, int], ...]
    stopped_by: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """A message for the operator."""

    group: str
    sentence: str


Action = StartGroup | SignalGroup | AskBan | AskJob | GroupEnded | Note
