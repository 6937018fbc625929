"""The example of a model that exists once, started by each launcher, beside the same script in plain FSDP2.

Slow: each test trains in several processes.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.processes.forked import FORKS
from tests.support.services.lighthouse_driver import lighthouse

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[3] / "examples" / "one_copy.py"
PLAIN = Path(__file__).parents[2] / "support" / "jobs" / "plain_fsdp2.py"
MORE_LINES = 15
"""That the script may have beyond one of plain FSDP2."""
SECONDS = 200.0
SLURM = EXAMPLE.parents[1] / "deploy" / "slurm" / "group.sbatch"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


async def printed(*command: str, **variables: str) -> str:
    """Return the output of a command that succeeds."""
    environment = {**os.environ, "STEPS": "20", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", FORKS: "1", **variables}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(SECONDS):
            output = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0, output
    return output


def shards(*outputs: str) -> dict[str, str]:
    """Return the digest of the shard of each rank after the last step."""
    found = re.findall(r"rank (\d) of 4 step 20 shard ([0-9a-f]{16})", "\n".join(outputs))
    assert len(found) == 4, outputs
    return dict(found)


async def test_each_launcher_with_two_ranks_in_each_member_trains_as_plain_fsdp2(tmp_path: Path) -> None:
    plain = shards(await printed(*TORCHRUN, "--nproc-per-node=4", str(PLAIN)))
    words = ("--cold", "--replicas", "2", "--nproc-per-replica", "2", "--", str(EXAMPLE))
    assert shards(await printed(sys.executable, "-m", "keepstep_cli", "run", *words)) == plain
    by_hand = (*TORCHRUN, "--nproc-per-node=2", str(EXAMPLE))
    keepstep = tmp_path / "keepstep"  # the script of a Slurm task calls `keepstep run`
    keepstep.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -m keepstep_cli run --cold "$@"\n')
    keepstep.chmod(0o700)
    for command in (by_hand, ("bash", str(SLURM), str(EXAMPLE))):
        async with lighthouse() as one:
            tasks = [
                {
                    "REPLICA_GROUP_ID": str(number),
                    "NUM_REPLICA_GROUPS": "2",
                    "SLURM_ARRAY_JOB_ID": "77",
                    "SLURM_ARRAY_TASK_ID": str(number),
                    "SLURM_ARRAY_TASK_COUNT": "2",
                }
                for number in range(2)
            ]
            common = {"KEEPSTEP_LIGHTHOUSE": one.address, "RANKS": "2"}
            common["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
            outputs = await asyncio.gather(*(printed(*command, **common, **task) for task in tasks))
        assert shards(*outputs) == plain, command


def test_the_script_has_few_lines_more_than_one_of_plain_fsdp2() -> None:
    def lines(path: Path) -> int:
        return sum(bool(line.strip()) for line in path.read_text().splitlines())

    assert lines(EXAMPLE) - lines(PLAIN) <= MORE_LINES
