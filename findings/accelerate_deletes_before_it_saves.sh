#!/usr/bin/env bash
# Guess: with total_limit=1 save_state removes the earlier checkpoint when the new one is complete, so one is whole at
#   any time; after a save that failed, load_state() without a path takes the latest whole one.
# Seen: save_state first deletes all but the latest total_limit - 1 checkpoints, and then begins to write. After a save
#   that failed, none is whole. With total_limit=2 the earlier one is, but load_state() takes the folder with the
#   highest number, the incomplete one, and raises.
# Version: accelerate 1.15.0 with torch 2.13.0, ProjectConfiguration with automatic_checkpoint_naming=True.
# Why it matters: with total_limit=1, the choice where checkpoints are large, a full disk or a kill during a save loses
#   the whole training. With a higher limit a job that restarts by itself fails at each start, until a person removes
#   the folder.
# keepstep: a relay keeps the earlier checkpoint until a later one is committed, also if its disk is full:
#   tests/services/relay/test_relay_restart.py::test_a_full_disk_is_507_what_was_committed_is_safe_and_what_came_is_still_served
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
export ACCELERATE_USE_CPU=1
program <<'PYTHON'
import logging
import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from finding import compare, show_versions

logging.disable()
show_versions("accelerate", "torch")


class Reader:
    """A part of the state whose second save finds the disk full."""

    saves = 0

    def state_dict(self):
        self.saves += 1
        if self.saves == 2:
            raise OSError(28, "No space left on device")
        return {}

    def load_state_dict(self, state):
        pass


def prepared(total_limit):
    configuration = ProjectConfiguration(
        project_dir=f"limit_{total_limit}", automatic_checkpoint_naming=True, total_limit=total_limit
    )
    accelerator = Accelerator(project_config=configuration)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.register_for_checkpointing(Reader())
    return accelerator, model


def loads(total_limit, checkpoint=None):
    """Whether a new process can load that checkpoint, or the one that Accelerate chooses."""
    accelerator, _ = prepared(total_limit)
    try:
        accelerator.load_state(checkpoint)
    except Exception:
        return False
    return True


for total_limit, guess, known in ((1, (1, True), (0, False)), (2, (1, True), (1, False))):
    accelerator, model = prepared(total_limit)
    accelerator.save_state()
    try:
        accelerator.save_state()
    except OSError:
        pass
    folder = f"limit_{total_limit}/checkpoints"
    compare(
        f"total_limit={total_limit}, after a failed save: number of checkpoints that load; whether load_state() does",
        guess=guess,
        seen=(sum(loads(total_limit, f"{folder}/{name}") for name in os.listdir(folder)), loads(total_limit)),
        known=known,
    )
PYTHON
