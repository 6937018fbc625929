"""``keepstep checkpoint export`` and ``import``: files of torch.save, safetensors, torch.distributed.checkpoint."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from keepstep_cli.asking.checkpoint_place import Places, with_places
from keepstep_cli.asking.defaults import TLS_FILES
from keepstep_cli.asking.options import Seconds, Size, all_of
from keepstep_cli.asking.progress import showing_progress
from keepstep_cli.errors import Missing

FORMATS = ("dcp", "torch", "safetensors")
MAX_NAMED = 10

_common = all_of(
    click.option(
        "--format", "form", type=click.Choice(FORMATS), help="Format of the files.  [default: by their names]"
    ),
    click.option("--part", metavar="KEY", default="", help="Key of the part to convert, such as model."),
    click.option("--skip-objects", is_flag=True, help="Leave out values that the destination cannot hold."),
    click.option("--timeout", type=Seconds(), default=3600.0, show_default=True, help="Time limit at the relay."),
)


@click.command("export")
@with_places
@_common
@click.option("--shard-size", type=Size(), help="For safetensors: write a folder with files of at most this size.")
@click.argument("checkpoint")
@click.argument("destination", type=click.Path(path_type=Path))
def export_files(
    places: Places, *, checkpoint: str, destination: Path, form: str | None, shard_size: int | None, **how: Any
) -> None:
    """Write a checkpoint as files of another program. Every byte is verified.

    CHECKPOINT is a name at the relay, a URL, or a directory (with a slash: ./checkpoint). DESTINATION is a file
    of torch.save (.pt, .pth, .bin), a safetensors file, or else a directory of torch.distributed.checkpoint.
    """
    with _converting(places) as interchange:
        source = places.existing(checkpoint)
        done = _convert(
            places,
            lambda **common: interchange.export_checkpoint(source, destination, shard_bytes=shard_size, **common),
            interchange,
            form,
            how,
        )
    _show(places, done, checkpoint, str(destination))


@click.command("import")
@with_places
@_common
@click.option("--step", type=click.IntRange(0), default=0, show_default=True, help="Step of the new checkpoint.")
@click.option("--allow-pickle", is_flag=True, help="Run code in a file of torch.save. Only for a file of your own.")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("checkpoint")
def import_files(
    places: Places, *, source: Path, checkpoint: str, form: str | None, step: int, allow_pickle: bool, **how: Any
) -> None:
    """Save files of another program as a checkpoint. No code in the files is run.

    SOURCE is a file of torch.save, a safetensors file, index or folder, or a directory of torch.distributed.checkpoint.
    CHECKPOINT is a new name at the relay, a URL, or a new directory (with a slash: ./checkpoint).
    """
    with _converting(places) as interchange:
        target = places.new(checkpoint)
        done = _convert(
            places,
            lambda **common: interchange.import_checkpoint(
                source, target, step=step, allow_pickle=allow_pickle, **common
            ),
            interchange,
            form,
            how,
        )
    _show(places, done, str(source), checkpoint)


@contextmanager
def _converting(places: Places) -> Iterator[Any]:
    """Yield ``keepstep.checkpoint.interchange``, loaded by name: only commands that need torch import it."""
    from keepstep_mesh.errors import KeepstepError

    try:
        interchange = importlib.import_module("keepstep.checkpoint.interchange")
    except ImportError as error:
        raise Missing(f"this command needs {error.name}: pip install 'keepstep[train]'") from error
    for name, file in zip(TLS_FILES, (places.tls.cert, places.tls.key, places.tls.ca), strict=True):
        if file is not None:
            os.environ[f"KEEPSTEP_{name.upper()}"] = str(file)  # where the worker library reads them
    try:
        with _ended_by_sigterm():
            yield interchange
    except (KeepstepError, TypeError, TimeoutError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename or 'a file'}: {error.strerror or error}") from error


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise ``SystemExit``, so that partial files are removed."""
    if threading.current_thread() is not threading.main_thread():  # Python allows no handler there
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _convert(
    places: Places, convert: Callable[..., Any], interchange: Any, form: str | None, how: dict[str, Any]
) -> dict[str, Any]:
    with showing_progress() as progress:
        done = convert(
            form=interchange.Format(form) if form else None,
            part=how["part"],
            skip_objects=how["skip_objects"],
            timeout=timedelta(seconds=how["timeout"]),
            token=places.token.latest(),
            progress=progress,
        )
    return {
        "format": str(done.format),
        "tensors": done.tensors,
        "objects": done.objects,
        "bytes": done.nbytes,
        "left_out": list(done.left_out),
    }


def _show(places: Places, done: dict[str, Any], source: str, destination: str) -> None:
    if places.as_json:
        print(json.dumps({"source": source, "destination": destination, **done}))
        return
    from keepstep_mesh.text import bytes_text, listed

    size = f"{done['tensors']} tensors ({bytes_text(done['bytes'])}) and {done['objects']} other values"
    print(f"{source} -> {destination}: {size}, {done['format']}")
    if left_out := done["left_out"]:
        print(f"left out: {listed(left_out, MAX_NAMED)}")
