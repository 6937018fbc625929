"""A rank of a replica group in a process of its own, which writes durable checkpoints: a step for each pair of lines.

durable_peer.py LIGHTHOUSE RELAYS NAME EVERY [MIN_GROUPS], with RANK and the other variables of torchrun

"begin" begins a step, "commit" ends it, "finish" waits for its checkpoint, the end of input leaves. Each line is
answered with one of JSON: step, weight, saved, error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch

from keepstep import Manager, ProcessGroupGloo

ELEMENTS = 4 << 20
"""16 MiB, two chunks that differ and change with each step."""
MINUTE = timedelta(seconds=60)


def main(lighthouse: str, relays: str, name: str, every: str, groups: str = "1") -> None:
    rank = int(os.environ.get("RANK", "0"))
    held = {"w": torch.arange(ELEMENTS, dtype=torch.float32) + 100 * rank}
    manager = Manager(
        ProcessGroupGloo(timeout=MINUTE),
        state_dict=lambda: dict(held),
        load_state_dict=held.update,
        lighthouse_addr=lighthouse,
        replica_id=name,
        min_replica_size=int(groups),
        durable_every=int(every),
        durable_relays=relays,
        durable_copies=len(relays.split(",")),
        init_sync=False,
    )
    gradient = torch.zeros(1)
    for line in sys.stdin:
        match line.strip():
            case "begin":
                manager.start_quorum()
            case "commit":
                gradient.fill_(1.0)
                manager.allreduce(gradient).wait()
                if manager.should_commit():
                    held["w"] += gradient
            case "finish":
                while not manager.last_checkpoint.error and manager.last_checkpoint.step < manager.current_step():
                    time.sleep(0.01)  # the writer is another thread
        last = manager.last_checkpoint
        facts = {"step": manager.current_step(), "weight": held["w"][0].item()}
        print(json.dumps({**facts, "saved": last.step, "error": last.error}), flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
