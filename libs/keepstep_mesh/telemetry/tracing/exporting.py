"""Begin the export of spans and logs, if ``KEEPSTEP_OTEL`` asks for it. Else nothing of OpenTelemetry is imported."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING

from keepstep_mesh.config.settings import from_environment
from keepstep_mesh.protocol.telemetry_records import EventRecord, Record
from keepstep_mesh.telemetry.tracing.log_entry import LogEntry, plain
from keepstep_mesh.telemetry.tracing.spans import HEAL, LOGS, AttributeValue, chosen, of_record

if TYPE_CHECKING:
    from keepstep_mesh.telemetry.tracing.otlp_export import OtlpExport

GOODBYE_SECONDS = 1.0
"""Limit for sending the last records, or for exporting the last items, when a process ends."""

of_service: OtlpExport | None = None
"""The export of this process, if it runs services."""


def begin(name: str, instance: str, facts: dict[str, AttributeValue], logger: str = "keepstep") -> OtlpExport | None:
    """Return the export of this process, whose owner must close it; None: the process exports nothing.

    Args:
        name: kind of the process, such as ``trainer``.
        instance: tells it from others of its kind.
        facts: further attributes of its resource, without ``keepstep.``.
        logger: as in ``OtlpExport``.

    Raises:
        ValueError: ``KEEPSTEP_OTEL`` has an unknown name, or ``keepstep[otel]`` is not installed.
    """
    found = from_environment("OTEL")
    if found is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    variable, text = found
    try:
        wanted = chosen(text)
    except ValueError as error:
        raise ValueError(f"{variable}={text!r}: {error}") from error
    try:
        from keepstep_mesh.telemetry.tracing.otlp_export import OtlpExport  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise ValueError(
            f"{variable}={text!r} needs OpenTelemetry, and {error.name} is not installed: pip install 'keepstep[otel]'"
        ) from error
    resource = {
        "service.namespace": "keepstep",
        "service.name": f"keepstep-{name}",
        "service.version": version("keepstep"),
        "service.instance.id": instance,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        **{f"keepstep.{key}": value for key, value in facts.items()},
    }
    return OtlpExport(wanted, resource, logger)


@contextlib.contextmanager
def exporting_service(name: str) -> Iterator[None]:
    """Export the logs, and the spans of records, of the services of this process, within the block."""
    global of_service
    export = of_service = begin(name, f"{socket.gethostname()}:{os.getpid()}", {}, logger="")
    try:
        yield
    finally:
        of_service = None
        if export is not None:
            export.close(GOODBYE_SECONDS)


def export_record(export: OtlpExport, record: Record) -> None:
    """Export a record that a service sends to the metrics service: an upload as a span, an event as a log."""
    if isinstance(record, EventRecord):
        if LOGS in export.wanted:
            export.add(_event(record))
    elif HEAL in export.wanted and (span := of_record(record)) is not None:
        export.add(span)


def _event(record: EventRecord) -> LogEntry:
    facts = {"job": record.job, "replica_id": record.replica_id, "epoch": record.epoch, **record.detail}
    return LogEntry(
        t=record.t,
        level="INFO",
        logger="keepstep.lighthouse.event_log",
        body=record.event,
        attributes={f"keepstep.{name}": plain(value) for name, value in facts.items() if value not in (None, "")},
        event_name=f"keepstep.{record.event}",
    )
