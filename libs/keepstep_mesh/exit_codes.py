"""Exit codes of trainer processes, which launchers rely on."""

from __future__ import annotations

import signal

EXIT_STATE_MISMATCH = 65
"""The group cannot load the state of the job (EX_DATAERR). Do not restart it unchanged."""
EXIT_WATCHDOG = 70
"""The process was stuck, and ended itself with the stacks of its threads (EX_SOFTWARE). Restart the group."""
EXIT_GROUP_FAILED = 75
"""Another rank of the group died or was stopped, so all its ranks end. Restart the group (EX_TEMPFAIL)."""
EXIT_COLLECTIVES_DIFFER = 76
"""The group began another number of collectives than other groups (EX_PROTOCOL). Do not restart it unchanged."""
EXIT_EVICTED = 77
"""The group was evicted or is banned (EX_NOPERM). Start it again after the ban."""
EXIT_MISMATCH = 78
"""The model or settings of the group differ from those of the job (EX_CONFIG). Do not restart it unchanged."""
EXIT_START_REFUSED = 79
"""The job has finished, or may not go back to the step of this group. Do not restart it unchanged."""
EXIT_JOB_CLOSED = 80
"""The groups of the job have finished, and this one does not have their final state. A restart would end the same."""
EXIT_DIVERGED = 81
"""The weights of the group differ from those of other groups, and a heal did not or cannot repair that. Do not restart
it unchanged."""
EXIT_SCRIPT_FAILS = 82
"""``keepstep run``: the script of a group ended with an error in each of its first lives, before the job committed a
step. Correct the script."""
EXIT_STATE_LOST = 83
"""A job with one copy: members were lost together with their keepers. Resume from a checkpoint."""
EXIT_HUNG = 84
"""The lighthouse found that the group hangs. Its processes wrote their stacks and ended. Restart the group."""
EXIT_PREFLIGHT = 85
"""The machine failed a check before its group joined, or computes other bits than equal machines. Start the group again
later: ``keepstep run`` waits for a time that doubles."""
ENDS_THE_SAME = frozenset(
    {
        EXIT_STATE_MISMATCH,
        EXIT_COLLECTIVES_DIFFER,
        EXIT_MISMATCH,
        EXIT_START_REFUSED,
        EXIT_JOB_CLOSED,
        EXIT_DIVERGED,
        EXIT_SCRIPT_FAILS,
        EXIT_STATE_LOST,
    }
)
"""Codes after which a restart would end the same."""


def describe_exit(code: int) -> str:
    """Return an exit code in words; negative: a signal."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
