"""Turn a record of the standard ``logging`` into a log of OpenTelemetry. Pure."""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass
from typing import Any, cast

from keepstep_mesh.config.logging import without_secrets
from keepstep_mesh.telemetry.tracing.spans import AttributeValue, SpanContext


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """A log line, without the objects of its process. ``t``: Unix time."""

    t: float
    level: str
    """Of Python: ``DEBUG`` to ``CRITICAL``."""
    logger: str
    body: str
    attributes: dict[str, AttributeValue]
    """Names as OpenTelemetry has them."""
    event_name: str = ""
    """Of an entry of the lighthouse's event log."""
    context: SpanContext | None = None
    """The span in which it was written."""


def entry_of(record: logging.LogRecord, context: SpanContext | None) -> LogEntry:
    """Return the entry of a log record of keepstep or of a library."""
    message, fields = cast("tuple[str | None, dict[str, Any]]", getattr(record, "keepstep", (None, {})))
    attributes = {f"keepstep.{name}": plain(value) for name, value in fields.items() if value is not None}
    if record.exc_info and (error := record.exc_info[1]) is not None:
        stack = "".join(traceback.format_exception(error))
        attributes["exception.type"] = type(error).__qualname__
        attributes["exception.message"] = without_secrets(str(error))
        attributes["exception.stacktrace"] = without_secrets(stack)
    return LogEntry(
        t=record.created,
        level=record.levelname,
        logger=record.name,
        body=without_secrets(record.getMessage()) if message is None else message,
        attributes=attributes,
        context=context,
    )


def plain(value: object) -> AttributeValue:
    """Return a value that an attribute may have: the text of all others, without secrets."""
    return value if isinstance(value, bool | int | float) else without_secrets(str(value))
