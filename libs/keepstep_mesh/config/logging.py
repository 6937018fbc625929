"""Logs: short lower-case events with fields, through the standard ``logging``, as JSON or for people.

``get_logger`` is for every module. In a process that configures nothing (a training script) events go to the
``logging`` logger of that name as one line of text, so that the script's own set-up rules. ``configure`` is for
processes of ours: it routes all logs, those of libraries too, to one stream. Texts that look like tokens are removed,
and control characters are escaped: a line may contain the text of another process.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.text import printable

if TYPE_CHECKING:  # structlog imports rich, so it is imported with the first event
    from structlog.stdlib import BoundLogger
    from structlog.typing import EventDict, WrappedLogger

    Logger = BoundLogger
else:
    Logger = Any

HIDDEN = "[hidden]"
_SECRET_NAMES = re.compile(r"token|secret|password|authorization", re.IGNORECASE)
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s,;'\"]+")
_LINES = "\n\t"
"""Kept in tracebacks and in the logs of libraries."""
_secrets: set[str] = set()


def hide(secret: str) -> None:
    """From now on ``secret`` is blotted out of every log line. Less than 6 characters are a word, not a secret."""
    if len(secret) >= 6:
        _secrets.add(secret)


def without_secrets(text: str) -> str:
    for secret in _secrets:
        text = text.replace(secret, HIDDEN)
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A structlog processor: hides fields named like secrets, known tokens and bearer headers."""
    for name, value in event.items():
        if _SECRET_NAMES.search(name) and value and not isinstance(value, bool):
            event[name] = HIDDEN
        elif isinstance(value, str):
            event[name] = without_secrets(value)
    return event


def _to_record(_logger: WrappedLogger, _method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """Pass a line of text to the handlers, and the fields to keepstep's own formatter."""
    keep = {name: event.pop(name) for name in ("exc_info", "stack_info") if event.get(name)}
    message = str(event.pop("event", ""))
    shown = {name: value for name, value in event.items() if name != "replica_id" or not _is_in_prefix(str(value))}
    text = message + "".join(f" {name}={value}" for name, value in shown.items())
    return (printable(text),), {**keep, "extra": {"keepstep": (message, dict(event))}}


def _is_in_prefix(replica_id: str) -> bool:
    """Whether ``keepstep run`` begins the lines of this process with the name in ``replica_id``."""
    return name_of(replica_id) == Path(os.environ.get("KEEPSTEP_NAME_FILE", "")).name


def _processors() -> tuple[Any, ...]:
    from structlog.stdlib import filter_by_level  # noqa: PLC0415  slow import

    return filter_by_level, redact, _to_record


class _WithFirstEvent:
    """Takes the place of a logger of structlog, and imports structlog when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        import structlog  # noqa: PLC0415  slow import

        wrapped = structlog.wrap_logger(
            logging.getLogger(self._name),
            _processors(),
            structlog.stdlib.BoundLogger,
            cache_logger_on_first_use=True,
        )
        self.__dict__[method] = getattr(wrapped, method)
        return self.__dict__[method]


def get_logger(name: str) -> Logger:
    """Return the logger of a module: ``get_logger("keepstep.manager")``."""
    return cast("Logger", _WithFirstEvent(name))


class LogFormatter(logging.Formatter):
    """Formats a record of keepstep or of a library as one JSON object, or as a line for people."""

    def __init__(self, *, as_json: bool, colors: bool = False) -> None:
        super().__init__()
        self.as_json = as_json
        self._colors = colors

    def format(self, record: logging.LogRecord) -> str:
        message, fields = cast("tuple[str | None, dict[str, Any]]", getattr(record, "keepstep", (None, {})))
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event: dict[str, Any] = {
            "timestamp": time,
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": without_secrets(record.getMessage()) if message is None else message,
            **fields,
        }
        if record.exc_info:
            event["exception"] = without_secrets(self.formatException(record.exc_info))
        if record.stack_info:
            event["stack"] = without_secrets(record.stack_info)
        if self.as_json:
            return _ascii_escapes(json.dumps(event, default=str, ensure_ascii=False))
        shown = {name: printable(one, _LINES) if isinstance(one, str) else one for name, one in event.items()}
        if message is not None:
            shown |= {
                name: printable(one) for name, one in (("event", message), *fields.items()) if isinstance(one, str)
            }
        from structlog.dev import ConsoleRenderer  # noqa: PLC0415  slow import

        render = ConsoleRenderer(colors=self._colors, pad_event_to=40)  # takes 14 us
        return str(render(None, record.levelname.lower(), shown))


def _ascii_escapes(line: str) -> str:
    """Return a line of JSON with escapes instead of the unprintable characters that JSON allows."""
    if line.isprintable():
        return line
    return "".join([one if one.isprintable() else json.dumps(one)[1:-1].replace("\x7f", "\\u007f") for one in line])


def configured() -> tuple[str, bool | None]:
    """Return the arguments of ``configure`` that give another process the same logs."""
    root = logging.getLogger()
    formats = [one.formatter.as_json for one in root.handlers if isinstance(one.formatter, LogFormatter)]
    return logging.getLevelName(root.level), formats[0] if formats else None


def configure(level: str = "info", *, as_json: bool | None = None, stream: TextIO | None = None) -> None:
    """Send the logs of the whole process to ``stream``. May be called repeatedly.

    Args:
        level: lowest level to log.
        as_json: whether to write JSON. None: JSON unless the stream is a terminal.
        stream: destination; default: stderr.

    Raises:
        ValueError: ``level`` is unknown.
    """
    stream = stream or sys.stderr
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise ValueError(f"invalid log level {level!r}: expected debug, info, warning, or error")
    terminal = stream.isatty()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter(as_json=not terminal if as_json is None else as_json, colors=terminal))
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old.formatter, LogFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(levels[level.upper()])
    # aiohttp logs every request to this one; the mesh's requests are no news.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    import structlog  # noqa: PLC0415  slow import

    structlog.configure(
        processors=list(_processors()),
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
