"""Train a tiny network on one replica group, and note when each part of its start ends. ``way_back.py`` starts it.

Each process writes lines ``part time`` (Unix time) to a file of its own: ``script`` (its first line), ``imports``,
``manager``, and ``commit`` for each committed step, with its number of participants, its own number, and whether this
group takes part.
"""

import os
import time

began = time.time()

import importlib  # noqa: E402
import sys  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402

LIBRARY, FOLDER, COMPUTE_SECONDS, *ALSO = sys.argv[1:]
"""``keepstep`` or ``torchft``; folder of the files; wait of each step in place of an accelerator; modules to import."""
PAUSE_SECONDS = 0.01
COLLECTIVE_SECONDS = 30.0


def main() -> None:
    import torch
    from torch.distributed import TCPStore

    for name in ALSO:
        importlib.import_module(name)
    library = importlib.import_module(LIBRARY)
    groups = importlib.import_module(f"{LIBRARY}.process_group")
    # These come when they are asked for, and the first optimizer of a process imports torch._dynamo.
    gloo, manager_class = groups.ProcessGroupGloo, library.Manager
    optimizer_class, parallel = library.Optimizer, library.DistributedDataParallel
    importlib.import_module("torch._dynamo")
    imported = time.time()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if LIBRARY == "torchft":  # as torchrun does for each rank
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    model = torch.nn.Linear(10, 10)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    group = os.environ["REPLICA_GROUP_ID"]
    manager = manager_class(
        pg=gloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=timeout,
        replica_id=f"r{group}",
    )
    made = time.time()
    network = parallel(manager, model)
    optimizer = optimizer_class(manager, inner)
    with (Path(FOLDER) / f"{group}.{os.getpid()}").open("w") as out:
        out.write(f"script {began}\nimports {imported}\nmanager {made}\n")
        out.flush()
        while True:
            step = manager.current_step()
            optimizer.zero_grad()
            loss = network(torch.randn(32, 10)).square().mean()
            time.sleep(float(COMPUTE_SECONDS))  # in place of an accelerator
            loss.backward()
            optimizer.step()
            if manager.current_step() > step:
                part = manager.num_participants(), manager.current_step(), int(manager.is_participating())
                out.write(f"commit {time.time()} {' '.join(map(str, part))}\n")
                out.flush()
            time.sleep(PAUSE_SECONDS)  # in place of loading data


if __name__ == "__main__":
    main()
