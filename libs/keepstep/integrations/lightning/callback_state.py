"""The state of callbacks that heals, so that they decide alike in all groups, whatever their folders are."""

from __future__ import annotations

from typing import Any

from keepstep.integrations.lightning.lightning_modules import callbacks

SAVED_AT = "keepstep_saved_at"
"""Key of the step of the last checkpoint, which ``ModelCheckpoint`` saves once and has in no state."""


def states(own: list[Any]) -> dict[str, Any]:
    """Return the states of all callbacks."""
    found = {}
    for one in own:
        state = one.state_dict()
        if isinstance(one, callbacks.ModelCheckpoint):
            state = {**state, SAVED_AT: one._last_global_step_saved}  # noqa: SLF001
        found[one.state_key] = state
    return found


def load_states(own: list[Any], saved: dict[str, Any]) -> None:
    """Load the states of another group's callbacks."""
    for one in own:
        state = dict(saved.get(one.state_key) or {})
        if isinstance(one, callbacks.ModelCheckpoint) and state:
            one._last_global_step_saved = state.pop(SAVED_AT)  # noqa: SLF001
            state = in_folder(state, str(one.dirpath))
        if state:
            one.load_state_dict(state)


def in_folder(state: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the state of a ``ModelCheckpoint`` as it would be in ``folder``: in another one, it loads only a part."""
    other = str(state["dirpath"])

    def moved(path: str) -> str:
        return folder + path.removeprefix(other) if path.startswith(other) else path

    paths = {name: moved(state[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
    best = {moved(path): score for path, score in state["best_k_models"].items()}
    return {**state, **paths, "best_k_models": best, "dirpath": folder}
