"""Compare the final states and the losses of the three runs of a script."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.habits.runs import Run

MISTAKES = (
    "no state registered",
    "no gradients averaged",
    "model not in the registered state",
    "optimizer not in the registered state",
    "optimizer of other parameters",
    "other groups went on without this one",
    "state not restored",
    "every rank trains a whole model",
    "weights of groups differ",
    "optimizers stepped with other values",
    "frozen parameters differ",
    "registered state not checked",
    "optimizer changed after a discarded step",
)
"""Warnings and errors of keepstep about a script. A script that does not deserve them must not get them."""
SHOWN = 4
"""Differences that are shown."""


def expected(run: Run) -> dict[str, Any]:
    """Return what the script expects, as it gave it to ``start``."""
    found: dict[str, Any] = json.loads((run.folder / "expected.json").read_text())
    return found


def faults_of_keepstep(run: Run, torch_ddp: Run | None) -> list[str]:
    """Return in what the run with keepstep is not as the script expects.

    Args:
        run: the run with keepstep.
        torch_ddp: the run with torch's DDP, if its state is compared.
    """
    if not (run.folder / "expected.json").exists():
        return [f"the script did not start:\n{_tail(run.output)}"]
    said, hopes = run.output, expected(run)
    if hopes["refused"]:
        return [] if hopes["refused"] in said else [f"was not refused by {hopes['refused']!r}:\n{_tail(said)}"]
    if not run.fine:
        return [f"exit codes {run.codes} after {run.seconds:.0f} s:\n{_tail(said)}"]
    faults = [] if (run.folder / "killed").exists() else ["no group was killed"]
    faults += [f"warned: {one}" for one in MISTAKES if one in said and one not in hopes["warns"]]
    faults += [f"did not warn: {one}" for one in hopes["warns"] if one not in said]
    if missing := [group for group in (0, 1) if not (run.folder / f"final-{group}.pt").exists()]:
        return [*faults, f"group {missing[0]} did not finish with the other one:\n{_tail(said)}"]
    own, other = final(run, 0), final(run, 1)
    faults += [f"groups differ: {one}" for one in differences(own, other)]
    if torch_ddp is not None:
        faults += [f"not as DDP: {one}" for one in differences(own, final(torch_ddp, 0), known=hopes["ddp"])]
        if "loss" not in hopes["ddp"] and "" not in hopes["ddp"]:
            for group in (0, 1):
                faults += _losses_differ(run, torch_ddp, group)
    return faults


def faults_of_ddp(run: Run, plain: Run) -> list[str]:
    """Return in what the run with torch's DDP differs from plain torch, against what the script expects."""
    faults = [
        f"{kind}: exit codes {one.codes} after {one.seconds:.0f} s:\n{_tail(one.output)}"
        for kind, one in (("plain", plain), ("ddp", run))
        if not one.fine
    ]
    if faults:
        return faults
    hopes = expected(run)
    return [
        f"DDP not as plain torch: {one}"
        for one in differences(final(run, 0), final(plain, 0), known=hopes["plain"], tolerance=hopes["tolerance"])
    ]


def final(run: Run, group: int) -> dict[str, Any]:
    """Return the final state of a process."""
    # the harness has started the script that wrote this file, and states of some scripts hold more than tensors
    state: dict[str, Any] = torch.load(run.folder / f"final-{group}.pt", weights_only=False)
    return state


def differences(
    one: dict[str, Any], other: dict[str, Any], *, known: Mapping[str, str] = {}, tolerance: float = 0.0
) -> list[str]:
    """Return the leaves of two states that differ, as sentences.

    Args:
        one: state.
        other: state.
        known: parts of the names of leaves that may differ.
        tolerance: of floats, relative or absolute. 0: they are equal in each bit.
    """
    here, there = _leaves(one), _leaves(other)
    named = [name for name in {**here, **there} if not any(part in name for part in known)]
    found = []
    for name in named:
        if name not in here or name not in there:
            found.append(f"{name} is in one of them only")
        elif problem := _difference(here[name], there[name], tolerance):
            found.append(f"{name}: {problem}")
    return found[:SHOWN] + ([f"and {len(found) - SHOWN} others"] if len(found) > SHOWN else [])


def _leaves(state: dict[str, Any]) -> dict[str, Any]:
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(state)[0]}


def _difference(one: Any, other: Any, tolerance: float) -> str:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{tuple(one.shape)} {one.dtype} and {tuple(other.shape)} {other.dtype}"
        one, other = one.detach().to_dense(), other.detach().to_dense()
        equal = torch.equal(_bits(one), _bits(other))
        if not equal and tolerance and (one.is_floating_point() or one.is_complex()):
            equal = torch.allclose(one, other, tolerance, tolerance, equal_nan=True)
        return "" if equal or not one.numel() else f"differ by up to {(one - other).abs().max():.3g}"
    if isinstance(one, float) and isinstance(other, float):
        equal = one == other or (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=tolerance)
        return "" if equal else f"{one!r} and {other!r}"
    return "" if one == other or callable(one) else f"{one!r} and {other!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).resolve_conj().view(torch.uint8)


def losses(run: Run, group: int) -> dict[int, float]:
    """Return the loss of each step of a process. After a step that is discarded, the number of steps is as before."""
    path = run.folder / f"losses-{group}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(json.loads(line) for line in reversed(lines))


def _losses_differ(run: Run, torch_ddp: Run, group: int) -> list[str]:
    here, there = losses(run, group), losses(torch_ddp, group)
    # the killed group may have committed its last step before it noted the loss
    found = [step for step, loss in there.items() if step in here and here[step] != loss]
    if len(here) < len(there) - 2:
        return [f"group {group} noted {len(here)} losses, DDP {len(there)}"]
    if not found:
        return []
    return [f"loss of group {group} after step {found[0]}: {here[found[0]]!r}, DDP {there[found[0]]!r}"]


def _tail(text: str, lines: int = 25) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
