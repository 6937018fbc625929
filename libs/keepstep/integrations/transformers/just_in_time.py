"""``enable_jit_checkpoint`` in a group: a checkpoint at the end of the step, before the group leaves after SIGTERM.

The callback of Transformers saves three seconds after the signal, and ends the training: by then the group has left,
and another last step than that of the other groups is an error.
"""

from __future__ import annotations

import signal
from typing import Any


def take_over_sigterm(trainer: Any) -> bool:
    """Take the callback of ``enable_jit_checkpoint`` from a Trainer, and its signal handler from the process.

    Returns:
        Whether the Trainer had one.
    """
    handler = trainer.callback_handler
    for one in [one for one in handler.callbacks if type(one).__name__ == "JITCheckpointCallback"]:
        handler.callbacks.remove(one)
        if one.jit_manager is not None:
            signal.signal(signal.SIGTERM, one.jit_manager._original_sigterm_handler or signal.SIG_DFL)  # noqa: SLF001
    return bool(getattr(trainer.args, "enable_jit_checkpoint", False))
