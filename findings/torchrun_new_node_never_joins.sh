#!/usr/bin/env bash
# Guess: if a node of an elastic job is replaced while the node of rank 0 stays, all ranks start again together, and
#   TORCHELASTIC_RESTART_COUNT is 1 on all of them.
# Seen: the torchrun of the new node ends with DistStoreError after read_timeout (60 s by default), in every try: it waits
#   for the address of the workers' store under the key of this round, and the torchrun of rank 0 wrote it under that of
#   the first round only. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 both start, with counts of 1 and 0: each torchrun
#   counts its own restarts.
# Version: torch 2.13.0, torch.distributed.elastic, rendezvous backend c10d.
# Why it matters: by default a job of several nodes does not survive the replacement of one. A program that names files,
#   keys of a store, or a random seed after the count finds that ranks of one start disagree.
# keepstep: docs/launchers.md sets the variable, and the count is not compared within a group on several machines:
#   tests/training/scripts/test_torchrun.py.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program <<'PYTHON'
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from finding import compare, show_versions

show_versions("torch")
WORKER = """
import os, sys, time
from pathlib import Path
folder, names = Path(sys.argv[1]), ("RANK", "TORCHELASTIC_RESTART_COUNT")
rank, count = (os.environ[name] for name in names)
(folder / f"{sys.argv[2]}-{rank}-{count}-{os.getpid()}").touch()
while not (folder / "lost").exists() or (sys.argv[2], count) != ("first", "0"):
    time.sleep(0.05)
sys.exit(1)  # as a collective without the lost rank would
"""
Path("worker.py").write_text(WORKER)


def outcome(own_store):
    folder = Path(f"store-{own_store}")
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def node(number, again=False):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=job"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        command += [f"--rdzv-conf=is_host={int(number == 0)},read_timeout=20", "--max-restarts=3", "worker.py", str(folder)]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": own_store}
        return subprocess.Popen([*command, "again" if again else "first"], env=environment, stderr=subprocess.DEVNULL)

    def workers():
        return [path.name.split("-") for path in folder.glob("*-*")]

    nodes = [node(0), node(1)]
    while len(workers()) < 2:
        time.sleep(0.05)
    lost = next(one for one in workers() if one[1] == "1")
    nodes[1].kill()
    os.kill(int(lost[3]), signal.SIGKILL)
    (folder / "lost").touch()
    new = node(1, again=True)
    while new.poll() is None and not any(kind == "again" for kind, *_ in workers()):
        time.sleep(0.05)
    counts = []
    if new.poll() is None:
        while len(workers()) < 4:
            time.sleep(0.05)
        running = {rank: int(count) for kind, rank, count, _ in workers() if kind == "again" or count != "0"}
        counts = [running[rank] for rank in sorted(running)]
    for one in (nodes[0], new):
        one.terminate()
        one.wait()
    return counts or "error of the new torchrun"


for own_store, known in (("0", "error of the new torchrun"), ("1", [1, 0])):
    compare(
        "TORCHELASTIC_RESTART_COUNT on ranks 0 and 1, after the node of rank 1 was replaced; "
        f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE={own_store}",
        guess=[1, 1],
        seen=outcome(own_store),
        known=known,
    )
PYTHON
