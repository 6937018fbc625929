"""The parameters that groups synchronize, and the lines by which groups compare them and the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from keepstep.collectives.codecs import Codec
from keepstep.collectives.codecs.error_feedback import ErrorFeedbackCodec
from keepstep.ddp import DistributedDataParallel, PureDistributedDataParallel
from keepstep.local_sgd.local_tensors import local_tensor
from keepstep.script_checks.common_values import optimizer_lines
from keepstep.state.values.sharding import is_dtensor
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.text import listed

log = get_logger("keepstep.local_sgd")

MAX_NAMED = 3
"""Parameters that an error names."""


def parameters_of_model(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters that LocalSGD averages: those that train, and those of the optimizer.

    Raises:
        ValueError: the optimizer trains parameters that are not in the model, or the model has none to train.
    """
    found = _parameters(model, {id(one) for one in in_optimizer(optimizer)})
    if not found:
        raise ValueError("the model has no parameter to train; pass the model whose parameters the optimizer has")
    _check_inner(optimizer, [found], "the model: pass the model whose parameters the optimizer has")
    return found


def parameters_of_fragments(
    fragments: Sequence[nn.Module], inner: Optimizer, outers: Sequence[Optimizer]
) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of each fragment that its outer optimizer has.

    Args:
        fragments: modules of the model.
        inner: the inner optimizer.
        outers: the outer optimizer of each fragment; several fragments may have the same.

    Raises:
        ValueError: a trained parameter is in no fragment, in two, or not in the outer optimizer of its fragment.
    """
    found: list[dict[str, nn.Parameter]] = []
    owners: dict[int, int] = {}
    for number, (fragment, outer) in enumerate(zip(fragments, outers, strict=True)):
        stepped = {id(one) for one in in_optimizer(outer)}
        parameters = _parameters(fragment, stepped)
        if not parameters:
            raise ValueError(f"fragment {number} has no parameter to train: leave it out of model_fragments")
        for name, parameter in parameters.items():
            if (owner := owners.setdefault(id(parameter), number)) != number:
                raise ValueError(
                    f"parameter {name!r} of fragment {number} is in fragment {owner} too: put modules that share "
                    f"parameters into one fragment"
                )
            if id(parameter) not in stepped:
                raise ValueError(
                    f"parameter {name!r} of fragment {number} is not in the outer optimizer: build that from the "
                    f"parameters of the fragment, or of the whole model"
                )
        found.append(parameters)
    _check_inner(inner, found, "model_fragments, so the groups would never average them: add their modules")
    return found


def in_optimizer(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of ``optimizer`` in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_for_codec(codec: Codec, fragments: Sequence[Mapping[str, nn.Parameter]], outers: Sequence[Optimizer]) -> None:
    """Raise ValueError if a codec cannot average a fragment at once. Warn of momentum that adds to error feedback."""
    for number, parameters in enumerate(fragments):
        devices = {str(one.device) for one in parameters.values()}
        if len(devices) > 1:
            raise ValueError(
                f"fragment {number} is on {', '.join(sorted(devices))}, and codec {codec.name} averages tensors of one "
                f"device: make a fragment for each device"
            )
        for name, one in parameters.items():
            if one.is_complex():
                raise ValueError(f"parameter {name!r} is {one.dtype}, and codec {codec.name} averages real floats only")
    momentum = any(group.get("momentum") for one in outers for group in one.param_groups)
    if momentum and isinstance(codec, ErrorFeedbackCodec):
        log.warning(
            "momentum of the outer optimizer overshoots with this codec",
            codec=codec.name,
            reason="the part that the codec sends late is trained again in the meantime",
            remedy="use an outer optimizer without momentum, such as torch.optim.SGD(parameters, lr=1.0)",
        )


def _parameters(module: nn.Module, stepped: set[int]) -> dict[str, nn.Parameter]:
    """Return the parameters that train, and those in ``stepped``: a frozen one may train later.

    Raises:
        TypeError: the module averages gradients.
    """
    if any(isinstance(one, (DistributedDataParallel, PureDistributedDataParallel)) for one in module.modules()):
        raise TypeError(
            "the model is in a keepstep.DistributedDataParallel, which averages the gradients of every step: pass the "
            "plain model"
        )
    return {
        name: one
        for name, one in module.named_parameters()
        if (one.requires_grad or id(one) in stepped) and (one.is_floating_point() or one.is_complex())
    }


def _check_inner(inner: Optimizer, found: Sequence[Mapping[str, nn.Parameter]], where: str) -> None:
    known = {id(one) for parameters in found for one in parameters.values()}
    missing = [f"shape {tuple(one.shape)}" for one in in_optimizer(inner) if id(one) not in known]
    if missing:
        raise ValueError(
            f"{len(missing)} parameters of the inner optimizer ({listed(missing, MAX_NAMED)}) are not in {where}"
        )


def parameter_lines(parameters: Mapping[str, nn.Parameter], prefix: str = "") -> list[str]:
    """Return a line for each parameter: its name, shape, dtype, and for a DTensor the shape of its shard."""
    return [f"{prefix}{name} {_form(parameter)}" for name, parameter in parameters.items()]


def _form(parameter: nn.Parameter) -> str:
    shard = f" shard {tuple(local_tensor(parameter).shape)}" if is_dtensor(parameter) else ""
    return f"{tuple(parameter.shape)} {parameter.dtype}{shard}"


def order_lines(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return a line for each parameter of an optimizer, whose state heals by position. ``parameters``: by name."""
    return optimizer_lines(optimizer, {id(one): name for name, one in parameters.items()})


def optimizer_line(number: int, optimizer: Optimizer) -> str:
    """Return a line for the outer optimizer of a fragment: its class, and the arguments that it was made with."""
    arguments = ", ".join(f"{name}={value}" for name, value in sorted(optimizer.defaults.items()))
    return f"fragment {number} outer optimizer {type(optimizer).__name__}({arguments})"
