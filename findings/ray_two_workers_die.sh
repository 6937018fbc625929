#!/usr/bin/env bash
# Guess: with FailureConfig(max_failures=100), Ray Train starts workers again that died, one or two of them. With
#   TorchftConfig it starts each again by itself, while the others go on.
# Seen: one dead worker is started again. If two die between two polls (2 s), the run ends with a ControllerError and
#   no retry: before it replaces the first, the controller waits for a call to all other workers, also to the second
#   dead one, and the ActorDiedError of that call is not one that it retries.
# Version: ray 2.60.0 with torchft-nightly 2026.10.26 and torch 2.13.0, Ray Train with TorchftConfig.
# Why it matters: a machine with two GPUs runs two workers, which die together. The loss of one such machine then ends a
#   job whose groups tolerate it.
# keepstep: the TorchTrainer of keepstep.integrations.ray ends all failed groups first
#   (tests/training/scripts/test_ray.py::test_groups_come_and_go_with_nodes_and_two_that_die_at_once_start_again_together).
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 ray==2.60.0 pandas==3.1.1 pyarrow==26.0.1 pydantic==2.14.3 tensorboardX==2.6.5 torchft-nightly==2026.10.26
program <<'PYTHON'
import os
import signal
import tempfile
import time
from pathlib import Path

import ray
from finding import compare, show_versions
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig

show_versions("ray", "torchft-nightly", "torch")


def train(config):
    """Kill the first process of the given workers while all train; the others wait until these are back."""
    rank = ray.train.get_context().get_world_rank()
    folder = Path(config["folder"])
    first = not (folder / f"started-{rank}").exists()
    (folder / f"started-{rank}").touch()
    if first:
        time.sleep(20)  # Ray Train has started all workers, and polls
        (folder / f"trains-{rank}").touch()
        while len(list(folder.glob("trains-*"))) < 3:
            time.sleep(0.1)
        if rank in config["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        (folder / f"again-{rank}").touch()
    while len(list(folder.glob("again-*"))) < len(config["die"]):
        time.sleep(0.1)


def outcome(die):
    """Return how a run of three workers ends of which some die at once."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": folder, "die": die},
            scaling_config=ScalingConfig(num_workers=3),
            torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=100)),
        )
        try:
            trainer.fit()
        except ray.train.ControllerError as error:
            return f"ControllerError of {type(error.controller_failure).__name__}"
        return "finished"


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
compare("one of three workers dies", guess="finished", seen=outcome([2]), known="finished")
known = "ControllerError of ActorDiedError"
compare("two of three workers die at once", guess="finished", seen=outcome([1, 2]), known=known)
ray.shutdown()
PYTHON
