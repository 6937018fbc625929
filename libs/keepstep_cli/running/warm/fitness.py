"""Decide whether a start may be warm, and what the template imports. Pure: no I/O.

A rank of a warm start begins with modules that another process has imported. So everything that an import could read
must be the same in both, or the start is cold:

1.  The command must run a script with this Python, with ``site``, which the template needs.
2.  Environment variables that were read while the template imported, and those that native code may have read.
3.  Facts that a child inherits of the process that starts it (``process_facts``).
4.  Files of modules.
5.  No debugger, profiler or coverage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

NATIVE = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "NUMEXPR_", "TORCH_", "PYTORCH_",
    "ATEN_", "C10_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "HIP_", "HSA_", "ROCR_", "ROCM_", "MIOPEN_", "SYCL_",
    "ONEAPI_", "ZE_", "DNNL_", "ONEDNN_", "LD_", "GLIBC_", "MALLOC_", "PYTHON", "LC_", "LANG", "TZ",
)  # fmt: skip
"""Beginnings of variables that native code reads when it is loaded."""
OF_TORCH = ("PYTORCH_", "TORCH_")
"""Beginnings of variables that only torch reads: later than its import, they have no effect on an import."""
NOT_AT_IMPORT = frozenset(
    ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "ZE_AFFINITY_MASK")
)
"""Drivers read them when a process first uses a GPU. A template that has used one is refused."""
TRACING = (
    "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE", "COV_CORE_CONFIG", "COV_CORE_DATAFILE",
    "PYDEVD_LOAD_VALUES_ASYNC", "PYTHONTRACEMALLOC", "PYTHONPROFILEIMPORTTIME", "PYTHONINSPECT", "PYTHONPERFSUPPORT",
)  # fmt: skip
OWN = ("keepstep", "keepstep_mesh", "keepstep_chaos", "keepstep_formats", "keepstep_megatron")
"""Packages that are imported wherever their source is."""


@dataclass(frozen=True, slots=True)
class Learned:
    """Imports of a rank, when its group had committed its first steps."""

    modules: tuple[tuple[str, str], ...]
    """Names and origins, in the order of the imports."""
    names: tuple[str, ...]
    """All names in ``sys.modules``."""
    variables: frozenset[str]
    """Environment variables that differ from those of its start."""


def script_of(command: Sequence[str], python: str, is_this_python: bool) -> str | None:
    """Return the script of a command, empty for ``-m``; None: the command may not be started warm.

    Args:
        command: of a rank.
        python: the Python of this process.
        is_this_python: the program of ``command`` is in the same environment as ``python``.
    """
    program, *rest = command
    if program != python and not is_this_python:
        return None
    while rest and rest[0] == "-u":
        rest = rest[1:]
    match rest:
        case ["-m", _, *_]:
            return ""
        case [str(script), *_] if not script.startswith("-"):
            return script
    return None


def tracing(environment: Collection[str]) -> str | None:
    """Return a variable that switches on a debugger, profiler or coverage."""
    return next((name for name in TRACING if name in environment), None)


def is_native(variable: str) -> bool:
    """Whether native code may read this variable when it is loaded."""
    return variable.startswith(NATIVE) and variable not in NOT_AT_IMPORT


def may_be_read(variable: str, read: Collection[str]) -> bool:
    """Whether imports read this variable. ``read``: names, and beginnings of names followed by ``*``."""
    if variable in read or is_native(variable):
        return True
    return any(one.endswith("*") and variable.startswith(one[:-1]) for one in read)


def differing(first: Mapping[str, str], others: Sequence[Mapping[str, str]]) -> set[str]:
    """Return the variables that do not have the same value in all environments."""
    return {name for one in others for name in {*first, *one} if first.get(name) != one.get(name)}


def differing_variable(template: Mapping[str, str], rank: Mapping[str, str], read: Collection[str]) -> str | None:
    """Return a variable that the imports may have read, and that has another value in the rank."""
    names = [name for name in sorted({*template, *rank}) if template.get(name) != rank.get(name)]
    return next((name for name in names if may_be_read(name, read)), None)


def set_by_script(learned: Learned | None, read: Collection[str], by_imports: Collection[str]) -> list[str]:
    """Return variables that the script sets itself, and that imports may read.

    Args:
        learned: of the script.
        read: as in ``may_be_read``.
        by_imports: variables that the imports set.
    """
    if learned is None:
        return []
    return sorted(one for one in learned.variables if may_be_read(one, read) and one not in by_imports)


def is_installed(name: str, origin: str, standard: str) -> bool:
    """Whether a module belongs to an installation, and not to the source that its user works on.

    Only such modules are imported ahead: what a script does itself, it does in each start.

    Args:
        name, origin: of the module.
        standard: folder of the standard library.
    """
    if name.partition(".")[0] in OWN:
        return True
    return (
        "/site-packages/" in origin
        or "/dist-packages/" in origin
        or origin.startswith(f"{standard}/")
        or origin in ("built-in", "frozen")
    )


def to_import(learned: Learned | None, preload: Sequence[str], standard: str) -> list[list[str]]:
    """Return names and origins of the modules to import, in order."""
    found = [] if learned is None else [[n, o] for n, o in learned.modules if is_installed(n, o, standard)]
    known = {name for name, _ in found}
    return found + [[name, ""] for name in preload if name not in known]
