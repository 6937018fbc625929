"""Export spans and logs over OTLP/HTTP, from a thread of its own.

The caller never waits: an item goes into a bounded queue. While the collector is slow or dead, new items are dropped
and counted. The exporters of OpenTelemetry read the ``OTEL_EXPORTER_OTLP_*`` variables, and retry within their timeout.

Needs ``keepstep[otel]``; so only ``exporting`` imports this module, when the process exports something.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http import _log_exporter, trace_exporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from opentelemetry.trace.status import Status, StatusCode

from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger, without_secrets
from keepstep_mesh.telemetry.tracing import spans
from keepstep_mesh.telemetry.tracing.log_entry import LogEntry, entry_of
from keepstep_mesh.telemetry.tracing.spans import AttributeValue, Span
from keepstep_mesh.threads.starting import Thread

MAX_QUEUED = 8192
"""Spans and logs that wait. 8192 spans take about 8 MiB."""
MAX_BATCH = 512
OWN_LOGGERS = ("keepstep.otel", "opentelemetry", "urllib3", "requests")
"""A failed export must not make further logs to export."""
SEVERITIES = {
    "DEBUG": SeverityNumber.DEBUG,
    "INFO": SeverityNumber.INFO,
    "WARNING": SeverityNumber.WARN,
    "ERROR": SeverityNumber.ERROR,
    "CRITICAL": SeverityNumber.FATAL,
}

log = get_logger("keepstep.otel")


class OtlpExport:
    """Exports the spans and logs of this process until ``close``.

    Args:
        wanted: names of the spans to export, and ``spans.LOGS``.
        facts: attributes of the resource. ``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SERVICE_NAME`` go first.
        logger: the logger whose records, and those below it, are exported as logs; "" for those of all.
        interval: seconds between two exports.
    """

    def __init__(
        self,
        wanted: frozenset[str],
        facts: Mapping[str, AttributeValue],
        logger: str,
        interval: float = 1.0,
    ) -> None:
        self.wanted = wanted
        self.context: spans.SpanContext | None = None
        """The span of the present step, which logs name."""
        self._overflowed = self._unsent = 0
        """Numbers of spans and logs that found a full queue, and that could not be sent."""
        self._resource = Resource.create(dict(facts)).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("keepstep", str(facts.get("service.version", "")))
        self._spans = trace_exporter.OTLPSpanExporter()
        self._logs = _log_exporter.OTLPLogExporter()
        self._interval = interval
        self._failures_logged = LogLimiter()
        self._pid = os.getpid()
        self._queue: deque[Span | LogEntry | Callable[[], Iterable[Span]]] = deque()
        self._stopping = threading.Event()
        self._late = False
        """Whether the time of ``close`` is over."""
        self._thread = Thread(target=self._run, name=f"keepstep-otel-{id(self):x}", daemon=True)
        self._quiet = _QuietThread(self._thread.name)
        for module in (trace_exporter, _log_exporter):  # they log each retry; this thread logs what is lost
            logging.getLogger(module.__name__).addFilter(self._quiet)
        self._source = logging.getLogger(logger)
        self._handler = _Handler(self)
        if spans.LOGS in wanted:
            self._source.addHandler(self._handler)
        self._thread.start()

    def add(self, item: Span | LogEntry | Callable[[], Iterable[Span]]) -> None:
        """Queue a span, a log, or a function that returns spans. From any thread; never waits and never raises."""
        if os.getpid() != self._pid:  # a forked child has no thread
            return
        # without a lock: a signal handler, or the garbage collector, may log while this thread is in here
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(item)
        else:
            self._overflowed += 1

    @property
    def dropped(self) -> int:
        """Number of spans and logs that were not exported."""
        return self._overflowed + self._unsent

    def enter(self, context: spans.SpanContext) -> None:
        """Name this span in the logs that follow."""
        self.context = context

    def leave(self) -> None:
        """Name no span in the logs that follow."""
        self.context = None

    def close(self, seconds: float) -> None:
        """Export what is left, within ``seconds``, and end the thread."""
        self._source.removeHandler(self._handler)
        self._stopping.set()
        self._thread.join(seconds)
        self._late = True
        for exporter in (self._spans, self._logs):
            exporter.shutdown()  # ends the wait before a retry
        self._thread.join(seconds)
        if self._thread.is_alive():  # in a request, until its timeout
            return
        for module in (trace_exporter, _log_exporter):
            logging.getLogger(module.__name__).removeFilter(self._quiet)

    # ---- on the thread

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            self._export_queued()
        self._export_queued()

    def _export_queued(self) -> None:
        while self._queue:
            items = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
            if self._late:
                self._lost(len(items), "the process ends")
                continue
            try:
                made = [one for item in items for one in (item() if callable(item) else (item,))]
                self._send(self._spans.export, [self._otel_span(one) for one in made if isinstance(one, Span)])
                self._send(self._logs.export, [self._otel_log(one) for one in made if isinstance(one, LogEntry)])
            except Exception as error:  # noqa: BLE001  an error of the library must not end the thread
                self._lost(len(items), f"{type(error).__name__}: {error}")

    def _send(self, export: Callable[[Sequence[Any]], Any], batch: Sequence[Any]) -> None:
        if batch and (result := export(batch).name) != "SUCCESS":
            self._lost(len(batch), result)

    def _lost(self, count: int, reason: str) -> None:
        self._unsent += count
        if self._failures_logged.allows(time.monotonic()):
            log.warning("could not export to the OTLP collector", reason=reason, dropped=self.dropped)

    def _otel_span(self, one: Span) -> ReadableSpan:
        return ReadableSpan(
            name=one.name,
            context=_otel_context(one.context),
            parent=None if one.parent is None else _otel_context(one.parent),
            resource=self._resource,
            attributes={f"keepstep.{name}": _encodable(value) for name, value in one.attributes.items()},
            status=Status(StatusCode.ERROR, _escaped(without_secrets(one.error))) if one.error else Status(),
            start_time=int(one.began * 1e9),
            end_time=int(one.ended * 1e9),
            instrumentation_scope=self._scope,
        )

    def _otel_log(self, one: LogEntry) -> ReadableLogRecord:
        inside = None if one.context is None else NonRecordingSpan(_otel_context(one.context))
        record = LogRecord(
            timestamp=int(one.t * 1e9),
            observed_timestamp=int(one.t * 1e9),
            context=set_span_in_context(inside) if inside is not None else None,
            severity_text=one.level,
            severity_number=SEVERITIES.get(one.level, SeverityNumber.UNSPECIFIED),
            body=_escaped(one.body),
            attributes={name: _encodable(value) for name, value in one.attributes.items()},
            event_name=one.event_name or None,
        )
        return ReadableLogRecord(record, self._resource, InstrumentationScope(one.logger))


def _otel_context(one: spans.SpanContext) -> SpanContext:
    return SpanContext(one.trace_id, one.span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _escaped(text: str) -> str:
    """Return the text with lone surrogates escaped, such as those of a file name: one would lose its whole batch."""
    return text.encode("utf-8", "backslashreplace").decode()


def _encodable(value: AttributeValue) -> AttributeValue:
    return _escaped(value) if isinstance(value, str) else value


class _Handler(logging.Handler):
    def __init__(self, export: OtlpExport) -> None:
        super().__init__()
        self._export = export

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(OWN_LOGGERS):
            try:
                self._export.add(entry_of(record, self._export.context))
            except Exception:  # noqa: BLE001  of a record that cannot be formatted
                self.handleError(record)


class _QuietThread(logging.Filter):
    """Drops the records of one thread."""

    def __init__(self, thread: str) -> None:
        super().__init__()
        self._thread = thread

    def filter(self, record: logging.LogRecord) -> bool:
        return record.threadName != self._thread
