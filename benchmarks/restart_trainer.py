"""Train a tiny network under torchrun, with checkpoints of torch.distributed.checkpoint. ``goodput.py`` starts it.

Each process writes lines to a file of its own, as ``way_back_trainer.py`` does: ``script time``, ``commit time ranks
step 1`` for each step, and ``save seconds``. The first start of a job times ``TRIALS`` saves and chooses the steps
between two of them from their median, for the mean time between failures that it is given. Each start reads that number
from the file `every`.
"""

import os
import time

began = time.time()

import statistics  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from goodput_model import best_every  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

FOLDER, COMPUTE_SECONDS, MEAN_SECONDS = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
PAUSE_SECONDS = 0.01
TRIALS = 8


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    out = (FOLDER / f"{rank}.{os.getpid()}").open("w", buffering=1)
    out.write(f"script {began}\n")
    # Restarted ranks of torch 2.13 find the addresses of those before in the store of torchrun, so each attempt has a
    # prefix of its own.
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", agent)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    model = torch.nn.Linear(10, 10)
    network, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=1e-3)

    def state() -> dict[str, object]:
        weights, sgd = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": sgd}

    def save(name: object) -> float:
        before = time.perf_counter()
        dcp.save(state(), checkpoint_id=saved / str(name))
        return time.perf_counter() - before

    saved, chosen = FOLDER / "checkpoints", FOLDER / "every"
    newest = max((int(one.parent.name) for one in saved.glob("[0-9]*/.metadata")), default=0)
    if newest:
        loaded = state()
        dcp.load(loaded, checkpoint_id=saved / str(newest))
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    if not chosen.exists():
        took = statistics.median([save(f"trial-{trial}") for trial in range(TRIALS)][2:])
        steps = [best_every(took, COMPUTE_SECONDS + PAUSE_SECONDS, MEAN_SECONDS)]
        dist.broadcast_object_list(steps)
        if rank == 0:
            chosen.write_text(str(steps[0]))
        dist.barrier()
    every, step = int(chosen.read_text()), newest
    while True:
        optimizer.zero_grad()
        loss = network(torch.randn(32, 10)).square().mean()
        time.sleep(COMPUTE_SECONDS)  # in place of an accelerator
        loss.backward()
        optimizer.step()
        step += 1
        out.write(f"commit {time.time()} {ranks} {step} 1\n")
        if step % every == 0:
            out.write(f"save {save(step)}\n")
        time.sleep(PAUSE_SECONDS)  # in place of loading data


if __name__ == "__main__":
    main()
