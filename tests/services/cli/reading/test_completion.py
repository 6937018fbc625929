"""Shell completion: bash itself completes a line, with the script that it was given; the other shells' words."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.support.services.lighthouse_driver import DEADLINE, lighthouse, round_of, workers


async def output_of(*command: str, folder: Path, **variables: str) -> str:
    """``keepstep`` is on the PATH."""
    wrapper = folder / "keepstep"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m keepstep_cli "$@"\n')
    wrapper.chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("KEEPSTEP", "TORCHFT"))}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**plain, "PATH": f"{folder}:{os.environ['PATH']}", **variables},
    )
    async with asyncio.timeout(DEADLINE):
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b""), err.decode()
    return out.decode()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the script for bash."""
    folder = tmp_path_factory.mktemp("bash")
    written = folder / "completion.bash"
    written.write_text(asyncio.run(output_of("keepstep", "completion", "bash", folder=folder)))
    return written


async def completed(line: str, script: Path, folder: Path, **variables: str) -> list[str]:
    """Return the completions of bash for the last word of ``line``."""
    words = line.split(" ")
    program = f"""
eval "$(cat {script})"
COMP_WORDS=({" ".join(shlex.quote(word) for word in words)}) COMP_CWORD={len(words) - 1}
_keepstep_completion keepstep
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    return (await output_of("bash", "-c", program, folder=folder, **variables)).split()


@asynccontextmanager
async def job() -> AsyncIterator[str]:
    """The address of a lighthouse with a job of r0 and r1, and a ban of another."""
    async with lighthouse() as one, workers(one.address, 2, "night") as members, aiohttp.ClientSession() as http:
        await round_of(members)
        url = f"{one.address}/v1/jobs/night/replicas/r7/evict"
        async with http.post(url, json={"reason": "x", "ban_seconds": 1000}) as answer:
            assert answer.status == 202
        yield one.address


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("keepstep ev", ["events", "evict"]),
        ("keepstep evict --b", ["--ban"]),
        ("keepstep completion z", ["zsh"]),
        ("keepstep policy --join", ["--join-timeout"]),
        ("keepstep nothing", []),
    ],
)
async def test_bash_completes_commands_and_flags(line: str, offered: list[str], script: Path, tmp_path: Path) -> None:
    assert await completed(line, script, tmp_path) == offered


async def test_bash_completes_names_that_the_lighthouse_knows(script: Path, tmp_path: Path) -> None:
    async with job() as address:
        for line, offered in (
            ("keepstep drain --job night ", ["r0", "r1"]),
            ("keepstep inspect --job night r1", ["r1"]),
            ("keepstep readmit --job night ", ["r7"]),
            ("keepstep replicas --job ", ["night"]),
            ("keepstep policy n", ["night"]),
            ("keepstep drain --job day ", []),
        ):
            assert await completed(line, script, tmp_path, KEEPSTEP_LIGHTHOUSE=address) == offered, line


async def test_without_a_lighthouse_no_name_is_offered_and_nothing_is_said(script: Path, tmp_path: Path) -> None:
    assert await completed("keepstep drain ", script, tmp_path, KEEPSTEP_LIGHTHOUSE="http://127.0.0.1:1") == []
    assert await completed("keepstep drain ", script, tmp_path, KEEPSTEP_LIGHTHOUSE="nonsense") == []


@pytest.mark.parametrize(
    ("shell", "loads", "said"),
    [
        ("zsh", "compdef _keepstep_completion keepstep", "plain\nevict\n"),
        ("fish", "complete --no-files --command keepstep", "plain,evict\t"),
    ],
)
async def test_zsh_and_fish_get_a_script_and_words(shell: str, loads: str, said: str, tmp_path: Path) -> None:
    assert loads in await output_of("keepstep", "completion", shell, folder=tmp_path)
    asked = {"COMP_WORDS": "keepstep ev", "COMP_CWORD": "1" if shell == "zsh" else "ev"}
    assert said in await output_of("keepstep", folder=tmp_path, _KEEPSTEP_COMPLETE=f"{shell}_complete", **asked)
