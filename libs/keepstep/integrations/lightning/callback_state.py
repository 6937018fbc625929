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


def load_states(trainer: Any, saved: dict[str, Any]) -> None:
    """Load the states of another group's callbacks."""
    for one in trainer.callbacks:
        state = dict(saved.get(one.state_key) or {})
        if isinstance(one, callbacks.ModelCheckpoint) and state:
            one._last_global_step_saved = state.pop(SAVED_AT)  # noqa: SLF001
            state = in_folder(state, str(one.dirpath))
        if state:
            one.load_state_dict(state)
        if state and isinstance(one, callbacks.BaseFinetuning):
            _add_parameters(trainer, one)


def _add_parameters(trainer: Any, finetuning: Any) -> None:
    """Train what ``finetuning`` has added to the optimizers of another group.

    Lightning's callback restores the groups of parameters of each optimizer, and leaves the parameters frozen.
    """
    own = [len(one.param_groups) for one in trainer.optimizers]
    finetuning.on_fit_start(trainer, trainer.lightning_module)
    for optimizer, number in zip(trainer.optimizers, own, strict=True):
        for group in optimizer.param_groups[number:]:
            for parameter in group["params"]:
                parameter.requires_grad_(True)


def in_folder(state: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the state of a ``ModelCheckpoint`` as it would be in ``folder``: in another one, it loads only a part."""
    other = str(state["dirpath"])

    def moved(path: str) -> str:
        return folder + path.removeprefix(other) if path.startswith(other) else path

    paths = {name: moved(state[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
    best = {moved(path): score for path, score in state["best_k_models"].items()}
    return {**state, **paths, "best_k_models": best, "dirpath": folder}
