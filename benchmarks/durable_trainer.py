"""Train one group block by block, with a checkpoint of each step or with none. ``durable.py`` starts both kinds.

Its arguments are the bytes of the state and the seconds of a step; settings come from the environment. For each line
``steps N`` it takes N steps, waits until its checkpoints are written, and prints ``done`` with two numbers for each
step: the milliseconds of the step, and those of them in which the training thread did not wait for the accelerator.
"""

from __future__ import annotations

import sys
import time

import torch

from keepstep import Manager, Optimizer, ProcessGroupGloo
from keepstep.ddp import DistributedDataParallel

SIZE, STEP_SECONDS = int(sys.argv[1]), float(sys.argv[2])
TENSOR_BYTES = 16 << 20
CHUNK_BYTES = 8 << 20


def main() -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(10, 10)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    bulk = [torch.ones(TENSOR_BYTES // 4) for _ in range(max(1, SIZE // TENSOR_BYTES))]

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])

    def change() -> None:  # of every chunk, so that all of them are uploaded
        for one in bulk:
            one[:: CHUNK_BYTES // 4] += 1

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict(), "bulk": bulk},
        min_replica_size=1,
        replica_id="durable",
    )
    network = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner, after_commit=[change])
    samples = torch.ones(32, 10)

    def step() -> tuple[float, float]:
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = network(samples).square().mean()
        waited = time.perf_counter()
        time.sleep(STEP_SECONDS)  # in place of an accelerator, for which the training thread waits
        waited = time.perf_counter() - waited
        loss.backward()
        optimizer.step()
        took = time.perf_counter() - began
        return 1e3 * took, 1e3 * (took - waited)

    print("ready", flush=True)
    for line in sys.stdin:
        times = [step() for _ in range(int(line.split()[1]))]
        while manager.last_checkpoint.uploading:
            time.sleep(0.01)  # nothing tells when it is written
        print("done", *(number for pair in times for number in pair), flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
