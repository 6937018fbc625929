"""Decide whether a group takes a failed step again, with the gradients that it has. Pure.

A step fails in all groups when a member of its quorum is lost before all of its all-reduces ended. With
``retry_allreduce`` the groups that are left ask for a quorum of the same step, reduce the same gradients again, and
commit what they would have committed alone. Rules:

* The failure must come from the other groups: a member was lost, or the connection to one ended. After an error of its
  own, a group cannot tell whether its gradients are right.
* The gradients must be those of the state that the job goes on from. A group that was behind in the failed quorum
  computed its gradients from other weights. The lighthouse denies the retry of a step that another group has committed.
* All ranks of the group must be able to reduce again, because they train on one batch: ``kept_reductions`` says
  whether a rank can. The ranks agree by a poll.
* A step is retried at most ``MAX_RETRIES`` times. Each loss needs one retry; a fault that stays needs another answer.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RETRIES = 3
"""Retries of one step."""


@dataclass(frozen=True, slots=True)
class FailedTry:
    """A try of a step that did not commit, in one rank."""

    retries: int
    """Of this step, so far."""
    own_error: bool
    """An error was reported that did not come from the other groups."""
    behind: bool
    """The group did not hold the state that its quorum went on from."""
    ending: bool
    """The process is about to end."""
    unrepeatable: str
    """Why an all-reduce of this rank cannot be repeated; empty: all can be."""


def obstacle(failed: FailedTry) -> str:
    """Return why this rank cannot repeat the step; empty: it can. All ranks of the group must be able to."""
    if failed.own_error:
        return "this group failed by itself"
    if failed.ending:
        return "this process is about to end"
    if failed.behind:
        return "this group was behind, so its gradients are of other weights"
    if failed.retries >= MAX_RETRIES:
        return f"it was retried {failed.retries} times"
    return failed.unrepeatable
