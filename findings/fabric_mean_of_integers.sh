#!/usr/bin/env bash
# Guess: Fabric.all_reduce, whose default is the mean, returns 1.5 for 1 and 2, or refuses integers as torch does.
# Seen: it returns 1, an integer. Integers above 2**24 change even if they are equal on all ranks, because it divides in
#   float32: 16,777,217 comes back as 16,777,216.
# Version: lightning 2.6.6 with torch 2.13.0, two processes.
# Why it matters: counts of tokens, correct answers and samples are integers. A mean of them over ranks, or a rate
#   computed from it, is too low by up to 1, and for 0 and 1 it is 0.
# keepstep: Manager.allreduce refuses an average of integers:
#   tests/services/manager/steps/test_steps.py::test_an_average_of_integers_is_refused_and_a_sum_is_not
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 lightning==2.6.6
program_of_ranks 2 <<'PYTHON'
import torch
import torch.distributed as dist
from finding import compare, show_versions
from lightning.fabric import Fabric

show_versions("lightning", "torch")
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()

own = dist.get_rank() + 1
compare("mean of 1 and 2", guess=1.5, seen=fabric.all_reduce(torch.tensor(own)).item(), known=1)
compare("mean of 1.0 and 2.0", guess=1.5, seen=fabric.all_reduce(torch.tensor(float(own))).item(), known=1.5)
large = torch.tensor(2**24 + 1)
compare("mean of 16777217 twice", guess=16777217, seen=fabric.all_reduce(large).item(), known=16777216)
PYTHON
