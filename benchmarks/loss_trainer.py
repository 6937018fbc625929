"""Train a language model with DiLoCo and one codec after another, in one replica group of one rank, for ``loss.py``.

The model predicts the next byte of the sources of Python's library; some of them are held out. Each run begins with
the same weights and draws the same batches as the others, with one of two outer optimizers. It writes a line: outer
optimizer, codec, loss of the held-out bytes after the last outer step, bytes that this group sent in collectives, and
seconds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keepstep import Manager, ProcessGroupGloo
from keepstep.collectives.codecs import Codec, Quantized, TopK, TwoBit
from keepstep.local_sgd import DiLoCo

CONTEXT, WIDTH, BATCH, HELD_OUT = 64, 64, 16, 256
TIMEOUT = timedelta(seconds=60)


class Counting(ProcessGroupGloo):
    """Counts the bytes that collectives of two ranks send."""

    sent = 0

    def _run(self, operation: str, *args: Any) -> Any:
        self.sent += {"allreduce": lambda: args[0][0].nbytes}.get(operation, lambda: args[1].nbytes)()
        return super()._run(operation, *args)


def without_feedback(kind: type[Codec], *arguments: float) -> Codec:
    """Return a codec that forgets what it did not send."""

    class Forgetful(kind):  # type: ignore[misc, valid-type]
        def settle(self, key: str, committed: bool) -> None:  # noqa: ARG002
            super().settle(key, committed=False)

    return Forgetful(*arguments)


CODECS: dict[str, Callable[[], Codec | None]] = {
    "none": lambda: None,
    "int8": lambda: Quantized("int8"),
    "two-bit": TwoBit,
    "two-bit without feedback": lambda: without_feedback(TwoBit),
    "top-k 1/16": lambda: TopK(1 / 16),
    "top-k 1/16 without feedback": lambda: without_feedback(TopK, 1 / 16),
    "top-k 1/64": lambda: TopK(1 / 64),
    "top-k 1/64 without feedback": lambda: without_feedback(TopK, 1 / 64),
}
OUTER: dict[str, dict[str, Any]] = {"momentum": {"lr": 0.7, "momentum": 0.9, "nesterov": True}, "plain": {"lr": 1.0}}
"""Arguments of the outer SGD."""


class LanguageModel(nn.Module):
    """Predicts the next byte after each byte of (batch, time); returns logits (batch, time, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        future = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.tokens(tokens) + self.positions.weight, mask=future, is_causal=True))


def windows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes to train on and the held-out ones, in an order without a pattern: (windows, CONTEXT + 1)."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    all_of_it = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)
    shuffled = all_of_it[torch.randperm(len(all_of_it), generator=torch.Generator().manual_seed(0))].long()
    return shuffled[HELD_OUT:], shuffled[:HELD_OUT]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(codec: Codec | None, outer_arguments: dict[str, Any], options: argparse.Namespace) -> tuple[float, int]:
    """Return the loss of the held-out bytes, and the bytes sent."""
    training, held_out = windows()
    torch.manual_seed(0)
    model = LanguageModel()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = torch.optim.SGD(model.parameters(), **outer_arguments)
    group = Counting(timeout=TIMEOUT)
    state = {"model": model, "inner": inner}
    manager = Manager(
        pg=group,
        load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
        state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
        lighthouse_addr=options.lighthouse,
        min_replica_size=options.groups,
        use_async_quorum=False,
        init_sync=False,
        timeout=TIMEOUT,
        replica_id=f"group_{options.group}",
    )
    random = torch.Generator().manual_seed(options.group)
    try:
        with DiLoCo(manager, [model], inner, outer, options.sync_every, use_bucketization=True, codec=codec):
            while manager.current_step() < options.steps:
                inner.zero_grad()
                loss_of(model, training[torch.randint(len(training), (BATCH,), generator=random)]).backward()
                inner.step()
        with torch.no_grad():
            return loss_of(model, held_out).item(), group.sent
    finally:
        manager.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="outer steps")
    parser.add_argument("--sync-every", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for outer, arguments in OUTER.items():
        for name, codec in CODECS.items():
            os.environ["KEEPSTEP_JOB"] = f"{outer}-{name.replace(' ', '-').replace('/', '-')}"
            began = time.monotonic()
            loss, sent = train(codec(), arguments, options)
            print(outer, name, loss, sent, time.monotonic() - began, sep="\t", flush=True)


if __name__ == "__main__":
    main()
