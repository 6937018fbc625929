"""torchtitan's own fault-tolerant trainer: two groups of two ranks with FSDP2; one group is killed and heals.

torchtitan is not a dependency: docs/torchtitan.md has the commands that install it. Its trainer runs on CUDA only, and
its wheel has no tokenizer and no data, so that the check writes small ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.tensor import DTensor

from tests.gpu.check import DIGEST, Check, Result
from tests.gpu.rank import Rank
from tests.gpu.training_checks import COMMIT_LIMIT_SECONDS, KILL_AFTER, STEPS_AFTER_HEAL

RANKS_OF_GROUP = 2
"""One rank would have no FSDP2, whose hook averages over the groups."""
GROUPS = 2
KILLER = 2
VICTIMS = frozenset({KILLER, 3})
"""The ranks of the second group."""
LOCALHOST = "127.0.0.1"
PACKAGE = "torchtitan.experiments.torchft"
WORDS = 200
"""In the vocabulary; the model has room for 2048."""


def why_not() -> str:
    """Return why the check cannot run here; empty: it can."""
    spec = importlib.util.find_spec("torchtitan")
    if spec and (Path(str(spec.origin)).parent / "experiments" / "torchft").exists():
        return ""
    return "torchtitan 0.3 is not installed: docs/torchtitan.md has the commands"


def write_assets(folder: Path) -> None:
    """Write a tokenizer of whole words, and a data set of sentences for it."""
    vocabulary = {"[UNK]": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number + 3 for number in range(WORDS)}
    folder.mkdir(parents=True)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "data").mkdir()
    lines = (" ".join(f"w{(line * word) % WORDS}" for word in range(100)) for line in range(1, 401))
    text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (folder / "data" / "train.jsonl").write_text(text)


def arguments(group: int, assets: Path, dump: Path) -> list[str]:
    """Return the arguments of ``torchtitan.train``, as docs/torchtitan.md has them, for a short run."""
    return [
        *("--module", "torchft.llama3", "--config", "llama3_torchft_debugmodel"),
        "--fault_tolerance.enable",
        *("--fault_tolerance.replica_id", str(group)),
        *("--fault_tolerance.group_size", str(GROUPS)),
        *("--fault_tolerance.semi_sync_method", "None"),  # the configuration has diloco
        *("--fault_tolerance.process_group", "nccl"),
        *("--parallelism.data_parallel_shard_degree", str(RANKS_OF_GROUP)),
        *("--training.steps", "100000"),  # the check ends before
        *("--training.local_batch_size", "2"),
        *("--training.seq_len", "128"),
        "--training.disable_cuda_graphs",  # a graph would replay the average with the groups of its capture
        *("--comm.train_timeout_seconds", "300"),  # a group that joins compiles while the others wait
        *("--hf_assets_path", str(assets)),
        *("--dataloader.dataset_path", str(assets / "data")),
        *("--dump_folder", str(dump)),
        "--checkpoint.enable",  # else no state is registered, and nothing heals
        *("--checkpoint.interval", "100000"),
        "--profiler.no_enable_profiling",
    ]


def _connect(rank: Rank, group: int, within: int) -> TCPStore | None:
    """Set the variables that torchrun sets. Return the store of the group, in its first rank."""
    key = f"titan/{group}/{rank.life}"
    served = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False) if within == 0 else None
    if served is not None:
        rank.tell(key, str(served.port))
    os.environ.update(
        MASTER_ADDR=LOCALHOST,
        MASTER_PORT=rank.await_told(key),
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 serves it already
        RANK=str(within),
        WORLD_SIZE=str(RANKS_OF_GROUP),
        LOCAL_RANK=str(rank.device.index),
        LOCAL_WORLD_SIZE=str(RANKS_OF_GROUP),
        TORCHFT_LIGHTHOUSE=rank.lighthouse,
        TORCHFT_TIMEOUT_SEC="120",
    )
    return served


def kill_and_heal(rank: Rank) -> Result:
    import keepstep.compat  # noqa: F401  before torchtitan, which looks for torchft

    trainers = importlib.import_module(f"{PACKAGE}.trainer")
    config_manager = importlib.import_module("torchtitan.config").ConfigManager
    group, within = divmod(rank.index, RANKS_OF_GROUP)
    if rank.index == 0:
        write_assets(rank.folder / "titan")
        rank.tell("assets")
    rank.await_told("assets")
    served = _connect(rank, group, within)
    parsed = config_manager().parse_args(arguments(group, rank.folder / "titan", rank.folder / "titan-dump"))
    rank.tell(f"pid/{rank.index}", str(os.getpid()))
    commits: list[tuple[float, int]] = []

    class Trainer(trainers.FaultTolerantTrainer):  # type: ignore[name-defined, misc]  # its package may be missing
        """Ends at the step that the healed group names."""

        def should_continue_training(self) -> bool:
            goal = rank.told("goal")  # all ranks know it steps before they get there
            return goal is None or self.ft_manager.manager.current_step() < int(goal)

        def train_step(self, data_iterator: Any) -> None:
            manager = self.ft_manager.manager
            before = manager.current_step()
            super().train_step(data_iterator)
            step, groups = manager.current_step(), manager.num_participants()
            if step == before:
                return
            commits.append((time.monotonic(), groups))
            if rank.index != KILLER or groups < GROUPS:
                return
            if rank.life == 0 and step >= KILL_AFTER:
                _kill_group(rank)
            if rank.life and rank.told("goal") is None:
                rank.tell("goal", str(step + STEPS_AFTER_HEAL))

    trainer = Trainer(parsed)
    trainer.train()
    manager = trainer.ft_manager.manager
    digest, step = _digest(trainer.model_parts), manager.current_step()
    trainer.close()
    manager.shutdown()
    dist.destroy_process_group()
    del served
    result = {DIGEST: digest, "steps": step}
    if rank.index in VICTIMS:
        return result
    pairs = itertools.pairwise(commits)
    gap = next(after[0] - last[0] for last, after in pairs if last[1] > after[1])  # the join compiles, and is longer
    assert gap < COMMIT_LIMIT_SECONDS, f"{gap:.2f} s without a commit (limit {COMMIT_LIMIT_SECONDS:g} s)"
    return {**result, "kill to next commit, s": round(gap, 3)}


def _kill_group(rank: Rank) -> None:
    """Kill this group. One rank does it, because a rank whose peer has died ends with an exit code."""
    for index in sorted(VICTIMS - {rank.index}):
        os.kill(int(rank.await_told(f"pid/{index}")), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _digest(model_parts: list[Any]) -> str:
    """Return a digest of all weights, bit for bit. All ranks of a group call it."""
    total = hashlib.sha256()
    for part in model_parts:
        for name, parameter in part.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            total.update(parameter.detach().full_tensor().cpu().numpy().tobytes())
    return total.hexdigest()[:16]


CHECKS = (
    Check(
        "torchtitan",
        "torchtitan's trainer in two groups of two ranks: one is killed and heals, and all weights are equal.",
        kill_and_heal,
        ranks=GROUPS * RANKS_OF_GROUP,
        seconds=240.0,
        needs_gpu="torchtitan's trainer finds no device but CUDA",
        restarted=VICTIMS,
        lighthouse=True,
        cannot_run=why_not(),
    ),
)
