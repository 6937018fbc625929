"""The units of deploy/systemd are valid, hardened, and use variables and flags of keepstep."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep_cli.main import main
from keepstep_lighthouse import settings as lighthouse_settings
from keepstep_mesh.config import variables
from keepstep_mesh.exit_codes import ENDS_THE_SAME
from keepstep_mesh.serving.service import STOP_SECONDS
from keepstep_metrics import settings as metrics_settings
from keepstep_relay import settings as relay_settings

UNITS = sorted((Path(__file__).resolve().parents[3] / "deploy" / "systemd").glob("*.service"))
TRAINER = next(one for one in UNITS if "@" in one.name)
SETTINGS = {"lighthouse": lighthouse_settings, "relay": relay_settings, "metrics": metrics_settings}
KEEPSTEP = "/opt/keepstep/bin/keepstep"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def values(unit: Path, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit.read_text().replace("\\\n", ""), re.MULTILINE)


def environment(unit: Path) -> dict[str, str]:
    return dict(one.split("=", 1) for line in values(unit, "Environment") for one in line.split())


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit_and_calls_it_protected(unit: Path, tmp_path: Path) -> None:
    """The program of the unit must exist, so ``python`` stands in for it."""
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(KEEPSTEP, sys.executable))
    for words in (["verify", "--man=no"], ["security", "--offline=true", "--threshold=50"]):
        command = ["systemd-analyze", *words, str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_trainer_is_not_started_again_after_a_code_that_would_come_again() -> None:
    (codes,) = values(TRAINER, "RestartPreventExitStatus")
    assert {int(code) for code in codes.split()} >= ENDS_THE_SAME


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_has_no_rights_and_time_to_stop(unit: Path) -> None:
    for line in ("DynamicUser=yes", "NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet="):
        assert line in unit.read_text().splitlines()
    (limit,) = values(unit, "TimeoutStopSec")
    grace = re.search(r"--grace (\d+)", unit.read_text())
    assert float(limit) > (float(grace[1]) if grace else STOP_SECONDS) + 5


@pytest.mark.parametrize("name", SETTINGS)
def test_a_service_reads_every_variable_of_its_unit(name: str, tmp_path: Path) -> None:
    (unit,) = [one for one in UNITS if one.stem == f"keepstep-{name}"]
    (tmp_path / "tokens").write_text("worker = a-worker-token-of-ours\n")
    given = {
        key: value.replace("%d", str(tmp_path)).replace("%S", "/var/lib") for key, value in environment(unit).items()
    }
    settings = SETTINGS[name].read_settings({}, given)
    assert settings.bind == f"0.0.0.0:{type(settings)().bind.rpartition(':')[2]}"
    assert "/var/lib/keepstep-" in str(settings)
    assert {one.removeprefix(f"KEEPSTEP_{name.upper()}_").lower() for one in given} <= {
        str(one.name) for one in main.all_commands()[name].params
    }
    assert values(unit, "StateDirectory") == [f"keepstep-{name}"]
    assert values(unit, "ExecStart") == [f"{KEEPSTEP} {name}"]


def test_the_trainer_runs_one_group_with_flags_of_the_command() -> None:
    (line,) = values(TRAINER, "ExecStart")
    line = (
        line.replace("%i", "3").replace("${GROUPS_IN_JOB}", "4").replace("${RANKS}", "8").replace("$SCRIPT", "train.py")
    )
    program, command, *words = shlex.split(line)
    with main.all_commands()[command].make_context(command, words) as context:
        given = {name: context.params[name] for name in ("replicas", "first_replica", "replicas_in_job", "program")}
    assert (program, command) == (KEEPSTEP, "run")
    assert given == {"replicas": 1, "first_replica": 3, "replicas_in_job": 4, "program": "train.py"}
    own = {name for name in environment(TRAINER) if name.startswith("KEEPSTEP_")}
    assert own <= set(variables.OF_CLIENTS) | set(variables.OF_TRAINERS)


def test_a_group_that_got_sigterm_is_not_started_again() -> None:
    assert values(TRAINER, "SuccessExitStatus") == ["143"], "128 + SIGTERM: the exit code of `keepstep run`"
    assert values(TRAINER, "Restart") == ["on-failure"]
