"""Spans of a step: their traces, parents and times; the export when the collector is dead."""

from __future__ import annotations

import importlib.util
import logging
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from keepstep.step.reporting.step_trace import StepTrace, TracedRank
from keepstep_mesh.protocol.telemetry_records import StepRecord, UploadRecord
from keepstep_mesh.telemetry.tracing.log_entry import entry_of
from keepstep_mesh.telemetry.tracing.spans import ALL_REDUCE, COMMIT, HEAL, LOGS, QUORUM, STEP, Span, chosen, of_record

UNIX = 1_000_000.0
ALL = chosen("all")


def record(**facts: Any) -> StepRecord:
    return StepRecord(**{"t": UNIX + 3.0, "step": 8, "quorum_id": 4, "committed": True, "seconds": 2.0, **facts})


def spans_of(name: str, rank: int = 0, wanted: frozenset[str] = ALL, quorum_id: int = 4) -> list[Span]:
    trace = StepTrace(TracedRank("job", f"{name}:1", rank))
    trying = trace.request(1.25)
    trying.formed(quorum_id, 77, 7, 12, 1.5)
    trace.present.phase(ALL_REDUCE, 2.0, 2.5, collectives=3)
    trace.present.phase(COMMIT, 2.5, 2.75)
    return list(trace.spans(1.0, 3.0, record(values={"loss": 0.5}), wanted, UNIX))


def test_the_spans_of_a_step_are_in_one_trace_in_all_groups_and_ranks() -> None:
    a, b, b1 = spans_of("a"), spans_of("b"), spans_of("b", rank=1)
    assert len({one.context.trace_id for one in (*a, *b, *b1)}) == 1
    assert len({one.context.span_id for one in (*a, *b, *b1)}) == 12
    step, *phases = b
    assert (step.name, step.parent, step.began, step.ended) == (STEP, None, UNIX + 1.0, UNIX + 3.0)
    assert [(one.name, one.parent) for one in phases] == [(name, step.context) for name in (QUORUM, ALL_REDUCE, COMMIT)]
    assert b1[0].parent == step.context, "the step of a further rank is a part of the group's"
    assert (step.attributes["step"], step.attributes["value.loss"], step.error) == (8, 0.5, "")
    assert spans_of("a", quorum_id=5)[0].context.trace_id != a[0].context.trace_id


def test_each_quorum_of_a_retried_step_has_a_span_of_its_own() -> None:
    seen: list[Any] = []
    trace = StepTrace(TracedRank("job", "a:1", 0), seen.append)
    trace.request(0.5).formed(4, 77, 7, 12, 0.75)
    trace.present.phase(ALL_REDUCE, 1.0, 1.5, ConnectionError("b is lost"))
    trace.failed("b is lost")
    trace.request(1.5).formed(5, 78, 7, 13, 1.75)
    found = list(trace.spans(1.0, 3.0, record(retries=1), ALL, UNIX))
    first, early, reduced, again, _ = found
    assert [one.name for one in found] == [STEP, QUORUM, ALL_REDUCE, STEP, QUORUM]
    assert (first.error, reduced.error, again.error) == ("b is lost", "ConnectionError: b is lost", "")
    assert (first.ended, again.began, again.ended) == (UNIX + 1.5, UNIX + 1.5, UNIX + 3.0)
    assert early.began == first.began == UNIX + 1.0, "a child does not begin before its parent"
    assert first.context.trace_id != again.context.trace_id
    assert seen == [first.context, again.context], "logs name the span before it has ended"


def test_the_script_chooses_spans_by_name() -> None:
    assert {one.name: one.parent for one in spans_of("a", wanted=frozenset({COMMIT}))} == {COMMIT: None}
    assert chosen(" heal , logs") == {HEAL, LOGS}
    with pytest.raises(ValueError, match=r"unknown name 'heals'; write all, or some of step, quorum"):
        chosen("heals")


def test_an_upload_of_a_relay_is_a_span() -> None:
    upload = UploadRecord(
        t=9.0, began=4.0, job="j", checkpoint="c", step=3, bytes=10, bytes_done=4, state="aborted", error="cut"
    )
    span = of_record(upload)
    assert span is not None
    assert (span.name, span.began, span.ended, span.error, span.attributes["bytes_done"]) == ("upload", 4, 9, "cut", 4)
    assert of_record(record()) is None


def test_a_log_has_the_fields_and_the_error_without_the_objects_of_the_process() -> None:
    try:
        raise OSError("no route")
    except OSError:
        line = logging.LogRecord("keepstep.x", logging.ERROR, __file__, 1, "text", (), sys.exc_info())
    line.keepstep = ("heal failed", {"step": 3, "source": None, "members": ["a", "b"]})
    entry = entry_of(line, None)
    assert (entry.body, entry.level) == ("heal failed", "ERROR")
    assert {"keepstep.step": 3, "keepstep.members": "['a', 'b']", "exception.type": "OSError"}.items() <= (
        entry.attributes.items()
    )
    assert "keepstep.source" not in entry.attributes


def test_without_the_variable_nothing_of_opentelemetry_is_imported() -> None:
    script = (
        "import sys; from keepstep_mesh.telemetry.tracing import exporting; "
        "assert exporting.begin('x', 'y', {}) is None; "
        "assert not [one for one in sys.modules if one.startswith(('opentelemetry', 'google', 'requests'))]"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


needs_otel = pytest.mark.skipif(importlib.util.find_spec("opentelemetry") is None, reason="needs keepstep[otel]")


@needs_otel
def test_a_dead_collector_delays_nothing_and_what_is_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from keepstep_mesh.telemetry.tracing import otlp_export

    with socket.socket() as silent:  # accepts in the kernel, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
        export = otlp_export.OtlpExport(ALL, {"service.name": "x"}, "keepstep.nobody", interval=0.01)
        span, more = spans_of("a")[0], 100
        began = time.thread_time()
        for _ in range(otlp_export.MAX_QUEUED + otlp_export.MAX_BATCH + more):
            export.add(span)
        assert time.thread_time() - began < 1.0, "its own work, without a wait"
        assert export.dropped >= more
        export.close(0.1)
        export._thread.join(60)  # the request that it has begun ends at its timeout
        assert export.dropped == otlp_export.MAX_QUEUED + otlp_export.MAX_BATCH + more


@needs_otel
def test_a_log_within_the_queueing_of_another_neither_waits_nor_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal handler, or the garbage collector, may log at any point of a thread."""
    from keepstep_mesh.telemetry.tracing import otlp_export

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    source = logging.getLogger("keepstep.somebody")
    monkeypatch.setattr(source, "propagate", False)  # pytest's handler raises errors of a format

    class Interrupted(deque[Any]):
        def append(self, item: Any) -> None:
            if not self:
                super().append(item)
                source.warning("%s and %s", "one")
                source.warning("within")
            else:
                super().append(item)

    export = otlp_export.OtlpExport(ALL, {"service.name": "x"}, source.name, interval=60.0)
    export._queue = queued = Interrupted()
    adding = threading.Thread(target=export.add, args=spans_of("a")[:1], daemon=True)
    adding.start()
    adding.join(60.0)
    assert [type(one).__name__ for one in queued] == ["Span", "LogEntry"]
    assert "not enough arguments" in capsys.readouterr().err, "as every handler of logging"
    export.close(1.0)


@needs_otel
def test_a_text_with_lone_surrogates_is_escaped_and_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file name that is not UTF-8 has them. Protobuf refuses the text, and with it the whole batch."""
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    from keepstep_mesh.telemetry.tracing import otlp_export

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    bodies: list[bytes] = []
    source = logging.getLogger("somebody")
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        export = otlp_export.OtlpExport(frozenset({LOGS}), {"service.name": "x"}, source.name, interval=60.0)
        source.warning("a")
        source.warning("b", extra={"keepstep": ("b\udcff", {"file": "c\udcff"})})
        collector.timeout = 20.0
        serving = threading.Thread(target=collector.handle_request)
        serving.start()
        export.close(20.0)
        serving.join()
    (told,) = [ExportLogsServiceRequest.FromString(one) for one in bodies]
    records = [record for scope in told.resource_logs[0].scope_logs for record in scope.log_records]
    assert [one.body.string_value for one in records] == ["a", "b\\udcff"]
    assert records[1].attributes[0].value.string_value == "c\\udcff"
    assert export.dropped == 0
