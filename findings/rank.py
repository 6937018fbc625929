"""Run the program that the argument names as one rank of a process group on Gloo, and end when all have run it."""

import os
import runpy
import sys

import torch.distributed as dist

dist.init_process_group("gloo")
runpy.run_path(sys.argv[1], run_name="__main__")
store = dist.distributed_c10d._get_default_store()  # the launcher holds it, so it outlives each rank
store.set(f"ended/{dist.get_rank()}", "")
store.wait([f"ended/{rank}" for rank in range(dist.get_world_size())])
sys.stdout.flush()
os._exit(0)  # the threads of Gloo do not end in order when the connections of other ranks close
