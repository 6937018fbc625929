"""A trainer for torchft in torchtitan's shape runs on keepstep: FSDP2 in each group, kills, heals, values to log.

So does one of torchtitan's own parts, where torchtitan is installed.
"""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs.job import Group, Job

JOBS = Path(__file__).parents[2] / "support" / "jobs"
TORCHTITAN = importlib.util.find_spec("torchtitan")
NEEDS_TORCHTITAN = pytest.mark.skipif(
    not TORCHTITAN or not (Path(str(TORCHTITAN.origin)).parent / "experiments" / "torchft").exists(),
    reason="torchtitan 0.3 is not installed: docs/torchtitan.md has the commands",
)
IMPORTS = 300.0
"""Limit in seconds of a wait that includes the imports of torchtitan, 15 s of CPU time in each trainer."""
LINE = re.compile(r"step (\d+) groups 2 loss ([\d.]+) tokens (\d+) (\w+)( writes)?")


def logged(group: Group) -> dict[int, tuple[str, ...]]:
    """Map each step of two groups to the line that a group printed after it."""
    return {int(one[1]): one.groups() for line in group.output if (one := LINE.fullmatch(line))}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["titan_shape.py", pytest.param("titan_parts.py", marks=NEEDS_TORCHTITAN)])
async def test_a_trainer_of_torchtitans_shape_heals_and_logs_values_of_all_groups(script: str) -> None:
    """Slow: six trainers."""
    async with Job("--initial-replicas", "2", "--verify-every", "5") as job:
        a, b = [await job.start(name, ranks=2, SCRIPTS=str(JOBS / script)) for name in ("0", "1")]
        await job.until(lambda: logged(a).keys() & logged(b).keys() >= {1, 2, 3}, "both train", IMPORTS)
        b.kill(rank=1)
        await b.exit_codes()
        before, heard = max(logged(b)), len(b.output)
        await job.start("1", ranks=2, SCRIPTS=str(JOBS / script))

        def healed() -> list[int]:
            return sorted(step for step in logged(a).keys() & logged(b).keys() if step > before + 1)

        await job.until(lambda: len(healed()) > 10, "the killed group heals and trains", IMPORTS)
        assert not [line for line in b.output[heard:] if "will not commit" in line], job.report()
        a.kill(number=signal.SIGTERM)
        b.kill(number=signal.SIGTERM)
        assert [await group.exit_codes() for group in (a, b)] == [[0, 0], [0, 0]], job.report()
        for step in healed()[:10]:  # in the last step one group leaves first
            assert logged(a)[step][:4] == logged(b)[step][:4], "loss and tokens of all groups, and equal weights"
            assert logged(a)[step][4] != logged(b)[step][4], "one group writes checkpoints"
        assert float(logged(a)[healed()[9]][1]) < float(logged(a)[1][1])
        assert not [line for line in a.output if "Traceback" in line], job.report()


PARSE = """
import sys
from pathlib import Path
import keepstep.compat
from tests.gpu.torchtitan_checks import arguments, write_assets
from torchtitan.config import ConfigManager
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer
assets = Path(sys.argv[1], "assets")
write_assets(assets)
config = ConfigManager().parse_args(arguments(1, assets, assets))
assert isinstance(config, FaultTolerantTrainer.Config)
assert FaultTolerantTrainer.train_step and FaultTolerantTrainer.should_continue_training, "the check extends them"
training, tokenizer = config.training, config.tokenizer.build(tokenizer_path=config.hf_assets_path)
length, size = training.seq_len, training.local_batch_size
loader = config.dataloader.build(
    dp_world_size=4, dp_rank=1, tokenizer=tokenizer, seq_len=length, local_batch_size=size
)
labels = next(iter(loader))[1]
print(config.fault_tolerance.semi_sync_method, training.disable_cuda_graphs, tuple(labels.shape), int(labels.max()) > 2)
"""


@NEEDS_TORCHTITAN
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed: docs/torchtitan.md")
@pytest.mark.timeout(IMPORTS)
def test_the_check_for_gpus_gives_torchtitan_arguments_and_data_that_it_accepts(tmp_path: Path) -> None:
    """Slow: the imports of torchtitan's trainer, which runs in `make gpu` only."""
    command = [sys.executable, "-c", PARSE, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=IMPORTS, cwd=JOBS.parents[2], check=False)
    assert found.stdout.splitlines()[-1:] == ["None True (2, 128) True"], found.stderr
