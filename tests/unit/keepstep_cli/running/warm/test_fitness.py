"""Which starts may be warm, and what the template imports."""

import pytest

from keepstep_cli.running.warm.fitness import (
    Learned,
    differing_variable,
    is_installed,
    script_of,
    set_by_script,
    to_import,
    tracing,
)

PYTHON = "/env/bin/python"
STANDARD = "/usr/lib/python3.11"


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ((PYTHON, "-u", "train.py", "--x"), "train.py"),
        ((PYTHON, "train.py"), "train.py"),
        ((PYTHON, "-u", "-m", "package.train", "-v"), ""),
        (("python3", "-m", "package"), ""),
        ((PYTHON, "-I", "train.py"), None),
        ((PYTHON, "-u", "-E", "train.py"), None),
        ((PYTHON, "-S", "-m", "package"), None),
        ((PYTHON, "-c", "print()"), None),
        ((PYTHON, "-m"), None),
        ((PYTHON,), None),
    ],
)
def test_only_commands_that_cannot_skip_the_hook_of_the_template_start_warm(
    command: tuple[str, ...], script: str | None
) -> None:
    assert script_of(command, PYTHON, is_this_python=command[0] == "python3") == script


def test_programs_that_are_not_this_python_start_cold() -> None:
    assert script_of(("torchrun", "train.py"), PYTHON, is_this_python=False) is None
    assert script_of(("/other/bin/python", "train.py"), PYTHON, is_this_python=False) is None


@pytest.mark.parametrize(
    ("name", "read", "cold"),
    [
        ("OMP_NUM_THREADS", [], True),
        ("PYTHONHASHSEED", [], True),
        ("CUDA_VISIBLE_DEVICES", [], False),
        ("CUDA_VISIBLE_DEVICES", ["CUDA_VISIBLE_DEVICES"], True),
        ("RANK", [], False),
        ("RANK", ["RANK"], True),
        ("TQDM_DISABLE", ["TQDM_*"], True),
        ("MASTER_PORT", ["TQDM_*"], False),
    ],
)
def test_a_start_is_cold_if_a_variable_that_imports_may_read_differs(name: str, read: list[str], cold: bool) -> None:
    same = {"PATH": "/bin"}
    for template, rank in (({name: "1"}, {name: "2"}), ({}, {name: "1"}), ({name: "1"}, {})):
        found = differing_variable(same | template, same | rank, read)
        assert found == (name if cold else None)
    assert differing_variable(same | {name: "1"}, same | {name: "1"}, read) is None


def test_a_variable_that_the_script_sets_counts_unless_an_import_sets_it() -> None:
    learned = Learned((), (), frozenset({"OMP_NUM_THREADS", "READ", "LATER", "TORCHINDUCTOR_CACHE_DIR"}))
    read = ["READ", "TORCHINDUCTOR_CACHE_DIR"]
    assert set_by_script(learned, read, ["TORCHINDUCTOR_CACHE_DIR"]) == ["OMP_NUM_THREADS", "READ"]
    assert set_by_script(None, read, []) == []


def test_coverage_and_debuggers_are_seen_in_the_environment() -> None:
    assert tracing({"PATH": "", "COVERAGE_PROCESS_START": "x"}) == "COVERAGE_PROCESS_START"
    assert tracing({"PATH": ""}) is None


def test_installed_modules_and_keepstep_are_imported_ahead_in_the_order_of_the_script() -> None:
    learned = Learned(
        (
            ("os", f"{STANDARD}/os.py"),
            ("sys", "built-in"),
            ("torch", "/env/lib/python3.11/site-packages/torch/__init__.py"),
            ("model", "/home/me/model.py"),
            ("keepstep", "/home/me/keepstep/__init__.py"),
            ("keepstep_own", "/home/me/keepstep_own.py"),
            ("apt", "/usr/lib/python3/dist-packages/apt/__init__.py"),
        ),
        (),
        frozenset(),
    )
    names = [name for name, _ in to_import(learned, ("model", "torch"), STANDARD)]
    assert names == ["os", "sys", "torch", "keepstep", "apt", "model"]
    assert not is_installed("model", "/home/me/model.py", STANDARD)
    assert to_import(None, ("a", "b"), STANDARD) == [["a", ""], ["b", ""]]
