"""Generate docs/python.md, the public Python names, from their signatures and docstrings (`make reference`)."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "python.md"
WIDTH = 118

HEAD = """\
# Python names

This page has every public class and function of keepstep. `make reference` generates it from the docstrings, and a
test compares the two. Change the code, not this page.

A training script needs the first two sections; [Recipes](recipes.md) shows them in use. `from keepstep import NAME`
works for every name whose signature begins with `keepstep.` and has no module after it.
"""


@dataclass(frozen=True)
class Section:
    """Names of one heading, in the order of the page: ``module:name``."""

    title: str
    about: str
    names: tuple[str, ...]


def section(title: str, about: str, module: str, names: str) -> Section:
    """Return a section; a name of another module has that module before a colon."""
    return Section(title, about, tuple(one if ":" in one else f"{module}:{one}" for one in names.split()))


SECTIONS = (
    section("The Manager", "", "keepstep", "Manager Finished WorldSizeMode"),
    section(
        "Model, optimizer, data",
        "",
        "keepstep",
        "DistributedDataParallel Optimizer DistributedSampler ElasticSampler ElasticLoader PureDistributedDataParallel",
    ),
    section(
        "Data of other libraries",
        "[Data](data.md) says when to use which.",
        "keepstep.integrations",
        "keepstep.integrations.grain:ElasticIterator keepstep.integrations.datasets:StreamLoader",
    ),
    section(
        "Quantized collectives",
        "[Quantized collectives](little-communication.md#quantized-collectives) describes them.",
        "keepstep.collectives",
        "allreduce_quantized reduce_scatter_quantized get_padded_sizes allocate_reduce_scatter_output "
        "keepstep.collectives.codecs:Codec keepstep.collectives.codecs:Quantized keepstep.collectives.codecs:TopK "
        "keepstep.collectives.codecs:TwoBit keepstep.quantization:fused_quantize_into_fp8 "
        "keepstep.quantization:fused_reduce_fp8 keepstep.quantization:fused_dequantize_from_fp8",
    ),
    section(
        "Process groups",
        "Pass one of the first three to the `Manager`. [Testing](testing.md#process-groups-that-fail) shows the "
        "wrappers.",
        "keepstep",
        "ProcessGroupGloo ProcessGroupNCCL ProcessGroupXCCL ManagedProcessGroup ProcessGroup ProcessGroupDummy "
        "ProcessGroupWrapper ErrorSwallowingProcessGroupWrapper FakeProcessGroupWrapper "
        "ProcessGroupBabyGloo ProcessGroupBabyNCCL "
        "ProcessGroupBabyXCCL keepstep.process_group:ProcessGroupBaby "
        "keepstep.process_group:ReconfigureOptions keepstep.process_group:reconfigure_with_store "
        "keepstep.process_group:create_store_client",
    ),
    section(
        "Sharded models",
        "[Groups of several ranks](hsdp.md#groups-of-several-ranks) has an example.",
        "keepstep.device_mesh",
        "average_over_groups all_reduce_hook ft_init_device_mesh ManagedDeviceMesh",
    ),
    section(
        "Training with little communication",
        "[The page of that name](little-communication.md) says when to use which.",
        "keepstep.local_sgd",
        "LocalSGD DiLoCo Decoupled extract_local_tensor",
    ),
    section(
        "Transports of live state",
        "The `Manager` creates a `RelayTransport` by itself. [The relay](relay.md#healing) describes the path of a "
        "heal.",
        "keepstep",
        "RelayTransport HTTPTransport PGTransport CheckpointTransport",
    ),
    section(
        "Durable checkpoints",
        "[Checkpoints of any number of ranks](torch-checkpoint.md) shows them in use.",
        "keepstep.checkpoint",
        "save async_save load open_reader CheckpointReader StoredCheckpoint RelayWriter RelayReader",
    ),
    section(
        "Sharded state",
        "[The page of that name](sharded.md) shows it in use.",
        "keepstep.sharded",
        "save load load_common_state_dict load_plain_tensors load_sharded_objects load_tensors_metadata "
        "load_sharded_metadata load_content_metadata validate_sharding_integrity AsyncCallsQueue AsyncRequest "
        "keepstep.sharded.strategies:NativeSaveStrategy keepstep.sharded.strategies:NativeLoadStrategy "
        "keepstep.sharded.strategies:TorchDistSaveShardedStrategy "
        "keepstep.sharded.strategies:TorchDistLoadShardedStrategy keepstep.sharded.strategies:CommonFileLoad "
        "FullyParallelSaveStrategyWrapper FullyParallelLoadStrategyWrapper "
        "keepstep.sharded.tensor_aware_state_dict:MCoreTensorAwareStateDict "
        "keepstep.sharded.strategies:register_default_strategy "
        "ShardedTensor ShardedObject ShardedTensorFactory LocalNonpersistentObject is_main_replica apply_factories "
        "apply_factory_merges keepstep.sharded.optimizer:get_param_id_to_sharded_param_map "
        "keepstep.sharded.optimizer:make_sharded_optimizer_tensor "
        "keepstep.sharded.optimizer:optim_state_to_sharding_state keepstep.sharded.validation:StrictHandling "
        "CheckpointingConfig maybe_load_config check_is_distributed_checkpoint save_config",
    ),
    section(
        "Checkpoints of other programs",
        "[The page of that name](interchange.md) shows them in use.",
        "keepstep.checkpoint.interchange",
        "export_checkpoint import_checkpoint Format Converted",
    ),
    section(
        "Deadlines",
        "",
        "keepstep.futures",
        "future_timeout future_wait context_timeout stream_timeout",
    ),
    section(
        "The quorum without a Manager",
        "Servers in threads, and blocking clients. `keepstep.coordination` works without torch. A deadline that passes "
        "raises `TimeoutError`; any other failure raises `RuntimeError` with the reason.",
        "keepstep.coordination",
        "LighthouseServer LighthouseClient Quorum QuorumMember ManagerServer ManagerClient QuorumResult",
    ),
    section(
        "A parameter server",
        "[Parameter server](parameter-server.md) shows it in use.",
        "keepstep.parameter_server",
        "ParameterServer",
    ),
    section("A component for torchx", "See [Launchers](launchers.md#torchx).", "keepstep.torchx", "hsdp"),
    section(
        "Tests of your own",
        "[Testing your training](testing.md) shows them in use.",
        "keepstep_mesh.testing",
        "ChaosProxy scripted_lighthouse",
    ),
    section(
        "Errors",
        "[Operating](operating.md#errors-and-what-to-do) says what to do, and [Exit codes](training.md#exit-codes-of-a-"
        "trainer) how a trainer ends.",
        "keepstep_mesh.errors",
        "KeepstepError Drained LayoutMismatch ForkError AuthError VersionError ProtocolError ManifestError "
        "SessionClosed Banned ExitWithReason keepstep.process_group:ProcessGroupError "
        "keepstep.process_group:ProcessGroupAbortedError keepstep.process_group:ProcessGroupTimeoutError "
        "keepstep.checkpointing:TransferError "
        "keepstep.checkpointing:StateMismatch "
        "keepstep.parameter_server:SessionRefused "
        "keepstep.checkpointing:UnsupportedValue keepstep.checkpoint:CheckpointError "
        "keepstep.checkpoint:CheckpointAborted keepstep.checkpoint:CheckpointNotFound "
        "keepstep.checkpoint:CheckpointDamaged keepstep.checkpoint:MissingKeys "
        "keepstep.sharded:CheckpointingException "
        "keepstep.checkpoint.interchange:ForeignCheckpointError keepstep.checkpoint.interchange:RefusedClass "
        "keepstep.checkpoint.interchange:CannotHold",
    ),
)
FIRST = {
    "Manager": "register_state_dict_fn start_quorum allreduce should_commit current_step batches_committed "
    "num_participants participating_rank is_participating record state_dict load_state_dict shutdown",
    "Optimizer": "zero_grad step",
}
"""Members that come first, in this order; the others follow as in the code."""
PUBLIC = (
    "keepstep",
    "keepstep.checkpoint",
    "keepstep.checkpointing",
    "keepstep.coordination",
    "keepstep.process_group",
)
"""Modules all of whose exported names are on the page."""
ALIASES = {"OptimizerWrapper"}
"""Exported names of a class that is on the page under another name."""
INTERNAL = {"forked", "steps", "background", "script_checker"}
"""Public by their name only: other modules of keepstep call them."""
HEADING = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$", re.MULTILINE)
ITEM = re.compile(r"^((?:\*{0,2}\w+)(?:, \w+)*): ?(.*)$")
ELSEWHERE = re.compile(r"(See ``\w+``\.)?")
"""The docstring of a member that another class describes."""


# ---- docstrings


def plain(text: str) -> str:
    """Markdown of a docstring's text: paragraphs are filled again, literals get single backticks."""
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(one if one.startswith(("    ", "* ")) else filled(one) for one in paragraphs)


def filled(text: str, after: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), WIDTH, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
    )


def items(label: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the names and the meaning of each argument or error in a docstring's section."""
    found: list[list[str]] = []
    for line in inspect.cleandoc(text).splitlines():
        item = None if line.startswith(" ") else ITEM.match(line)
        if item is not None:
            found.append([item[1], item[2]])
        elif found:
            found[-1][1] += f" {line.strip()}"
        else:
            raise ValueError(f"docstring of {label}: expected 'name: meaning', got {line!r}")
    yield from ((names, meaning) for names, meaning in found)


def described(label: str, of: Any) -> str:
    """Return the Markdown of a docstring in Google style.

    Raises:
        ValueError: the docstring names an argument that ``of`` does not have, or is not in Google style.
    """
    about, *parts = HEADING.split(inspect.cleandoc(of.__doc__ or ""))
    lines = [plain(about)] if about.strip() else []
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        body = textwrap.dedent(text.strip("\n"))
        if heading not in ("Args", "Raises", "Attributes"):
            lines.append(plain(f"**{heading}** {body}"))
            continue
        found = list(items(label, body))
        if heading == "Args":
            known = set(inspect.signature(of).parameters)
            named = {name.lstrip("*") for names, _ in found for name in names.split(", ")}
            if unknown := named - known:
                raise ValueError(f"{label} has no argument {', '.join(sorted(unknown))}, but its docstring names it")
        rows = (filled(f"* `{names}`: {plain(meaning)}", after="  ") for names, meaning in found)
        lines.append(f"**{heading}**\n\n" + "\n".join(rows))
    return "\n\n".join(lines) + "\n"


# ---- signatures


def default(value: object) -> str:
    if isinstance(value, timedelta):
        return f"timedelta(seconds={value.total_seconds():g})"
    if isinstance(value, enum.Enum):
        return str(value)
    if type(value).__name__ == "RedOpType":
        return f"ReduceOp.{value.name}"  # type: ignore[attr-defined]
    return value.__name__ if inspect.isbuiltin(value) else repr(value)


def parameter(one: inspect.Parameter) -> str:
    star = "*" * (one.kind is one.VAR_POSITIONAL) + "**" * (one.kind is one.VAR_KEYWORD)
    text = f"{star}{one.name}"
    if one.annotation is not one.empty:
        text += f": {one.annotation if isinstance(one.annotation, str) else inspect.formatannotation(one.annotation)}"
    return text if one.default is one.empty else f"{text} = {default(one.default)}"


def signature(name: str, of: Any) -> str:
    """Return a call of ``of`` with all parameters, on one line if it fits."""
    found = inspect.signature(of)
    parts: list[str] = []
    for one in found.parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(parameter(one))
    returns = found.return_annotation
    end = ")" if isinstance(of, type) or returns in (found.empty, None, "None") else f") -> {returns}"
    line = f"{name}({', '.join(parts)}{end}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + end


def block(text: str) -> str:
    return f"```\n{text}\n```"


# ---- the page


def members(shown: str, of: type) -> Iterator[str]:
    """Describe the public members of a class without its base classes; ``shown`` is its public name."""
    own = [name for name in vars(of) if not name.startswith("_") and name not in INTERNAL]
    first = FIRST.get(shown, "").split()
    elsewhere = []
    for name in [*first, *(one for one in own if one not in first)]:
        member = inspect.getattr_static(of, name)
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        if not isinstance(member, property) and not inspect.isfunction(member):
            continue
        if ELSEWHERE.fullmatch(member.__doc__ or ""):
            elsewhere.append(f"`{name}`")
            if not member.__doc__ and of.__bases__ == (object,):
                raise ValueError(f"{shown}.{name} is public and has no docstring")
            continue
        yield f"#### {shown}.{name}"
        yield block(name if isinstance(member, property) else signature(name, member)) + "\n"
        yield described(f"{shown}.{name}", member)
    if elsewhere:
        yield filled(f"As in the classes named above, or in the base class: {', '.join(elsewhere)}.") + "\n"


def entry(where: str) -> Iterator[str]:
    """Describe one public class or function."""
    module, _, name = where.partition(":")
    of = getattr(importlib.import_module(module), name)
    names = [one.partition(":")[2] for part in SECTIONS for one in part.names]
    yield f"### {name if names.count(name) == 1 else module.removeprefix('keepstep.') + '.' + name}"
    if not isinstance(of, type):
        yield block(signature(f"{module}.{name}", of)) + "\n"
    elif issubclass(of, BaseException):
        parents = [one.__name__ for one in of.__mro__[1:] if one not in (object, BaseException, Exception)]
        yield f"`{module}.{name}` ({', '.join(parents)})\n"
    elif issubclass(of, enum.Enum):
        yield f"`{module}.{name}`: {', '.join(one.name for one in of)}\n"
    elif "Attributes:" in (of.__doc__ or ""):  # a result, which callers do not create
        yield f"`{module}.{name}`\n"
    else:
        yield block(signature(f"{module}.{name}", of)) + "\n"
    yield described(name, of)
    if isinstance(of, type) and not issubclass(of, BaseException | enum.Enum):
        yield from members(name, of)


def python_names() -> str:
    """Return the page.

    Raises:
        ValueError: a public name is missing, or its docstring is wrong.
    """
    public = {name for module in PUBLIC for name in importlib.import_module(module).__all__}
    if missing := public - ALIASES - {where.partition(":")[2] for one in SECTIONS for where in one.names}:
        raise ValueError(f"add {', '.join(sorted(missing))} to SECTIONS in docs/docstrings.py")
    parts = [HEAD]
    for one in SECTIONS:
        parts.append(f"## {one.title}")
        if one.about:
            parts.append(filled(one.about) + "\n")
        for name in one.names:
            parts.extend(entry(name))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(python_names())
