"""``keepstep.compat`` puts ``keepstep.sharded`` in the place of Megatron Core's ``dist_checkpointing``."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from keepstep.compat.__main__ import FOLDER


def run(script: Path, text: str, *, path: str = "") -> str:
    """Run a script with the folder of keepstep.compat on the path. Return its output."""
    script.write_text(textwrap.dedent(text))
    found = os.pathsep.join(one for one in (str(FOLDER), path, os.environ.get("PYTHONPATH", "")) if one)
    command, environ = [sys.executable, "-u", str(script)], {**os.environ, "PYTHONPATH": found}
    return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout


def test_a_script_for_megatron_core_runs_without_megatron_core(tmp_path: Path) -> None:
    out = run(
        tmp_path / "train.py",
        """
        import subprocess, sys
        import torch
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from megatron.core.dist_checkpointing.mapping import ShardedTensor
        from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
        from megatron.core.dist_checkpointing.strategies import torch as formats
        import keepstep.sharded

        assert dist_checkpointing is keepstep.sharded
        part = lambda data: {"w": ShardedTensor.from_rank_offsets("w", data)}
        dist_checkpointing.save({**part(torch.ones(2)), "step": 3}, "one")
        state = dist_checkpointing.load(part(torch.zeros(2)), "one")
        strategy = get_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1)
        assert isinstance(strategy, formats.TorchDistLoadShardedStrategy)
        print(state["step"], state["w"].tolist())
        child = "import megatron.core.dist_checkpointing as one; print(one.__name__)"
        subprocess.run([sys.executable, "-c", child], check=True)
        """.replace('"one"', repr(str(tmp_path / "one"))),
    )
    assert out == "3 [1.0, 1.0]\nkeepstep.sharded\n"
    assert (tmp_path / "one" / ".metadata").exists(), "Megatron Core cannot read what was saved"


def test_other_modules_stay_those_that_are_beside_the_script(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    (core / "dist_checkpointing").mkdir(parents=True)
    (core / "__init__.py").write_text(
        "from megatron.core.dist_checkpointing.mapping import ShardedTensor\nIS_OWN = 1\n"
    )
    (core / "parallel_state.py").write_text("RANK = 7\n")
    (core / "dist_checkpointing" / "__init__.py").write_text("raise AssertionError('imported')\n")
    out = run(
        tmp_path / "train.py",
        """
        from megatron.core import IS_OWN, dist_checkpointing, parallel_state
        print(IS_OWN, parallel_state.RANK, dist_checkpointing.__name__)
        """,
    )
    assert out == "1 7 keepstep.sharded\n"


def test_the_sitecustomize_of_an_environment_still_runs(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text("IS_OTHER = True\n")
    out = run(
        tmp_path / "train.py", "import sitecustomize; print(sitecustomize.IS_OTHER)", path=str(tmp_path / "other")
    )
    assert out == "True\n"


def test_a_module_of_an_older_version_is_named(tmp_path: Path) -> None:
    out = run(
        tmp_path / "train.py",
        """
        try:
            import megatron.core.dist_checkpointing.strategies.tensorstore
        except ModuleNotFoundError as error:
            print(error)
        """,
    )
    assert "has no module 'strategies.tensorstore': docs/sharded.md" in out


def test_a_module_that_is_imported_already_is_not_replaced_in_silence(tmp_path: Path) -> None:
    (tmp_path / "dist_checkpointing.py").write_text("")
    out = run(
        tmp_path / "train.py",
        """
        import sys
        for name in [one for one in sys.modules if one.startswith("keepstep")]:
            del sys.modules[name]
        import dist_checkpointing
        sys.modules["megatron.core.dist_checkpointing"] = dist_checkpointing
        try:
            import keepstep.compat
        except ImportError as error:
            print(error)
        """,
    )
    assert "megatron.core.dist_checkpointing is imported already, from " in out
