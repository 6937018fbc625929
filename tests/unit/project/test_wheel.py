"""The sdist and the wheel have all that the repository has for an installation."""

from __future__ import annotations

import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

from hatchling.build import build_sdist, build_wheel

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [path.parent for top in ("libs", "services") for path in sorted((ROOT / top).glob("*/__init__.py"))]
SCRIPTS_OF_THE_DEMO = {"keepstep_cli/train_ddp.py", "keepstep_cli/durable.py", "keepstep_cli/one_copy.py"}


def test_a_wheel_made_from_the_sdist_has_every_file_of_every_package_and_torch_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build_sdist(str(tmp_path))) as sdist:
        sdist.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path / f"keepstep-{PROJECT['project']['version']}")
    with zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        of_pip = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
        installed = {name for name in wheel.namelist() if ".dist-info/" not in name}

    written = {path for package in PACKAGES for path in package.rglob("*") if path.is_file()}
    names = {"/".join(path.relative_to(ROOT).parts[1:]) for path in written if "__pycache__" not in path.parts}
    assert {f"{package.name}/py.typed" for package in PACKAGES} <= names
    assert installed == names | SCRIPTS_OF_THE_DEMO

    needs = Parser().parsestr(of_pip["METADATA"]).get_all("Requires-Dist", [])
    assert any(need.startswith("torch<") for need in needs)
    assert not [need for need in needs if need.startswith(("torch", "numpy", "scikit")) and "extra ==" not in need]
    assert "keepstep = keepstep_cli.main:main" in of_pip["entry_points.txt"]
