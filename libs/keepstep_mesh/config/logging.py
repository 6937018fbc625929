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
from typing import Any, TextIO, cast

from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.text import printable

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


def _redacted(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields`` without the values of those named like secrets, known tokens, and bearer headers."""
    shown = {}
    for name, value in fields.items():
        if _SECRET_NAMES.search(name) and value and not isinstance(value, bool):
            shown[name] = HIDDEN
        else:
            shown[name] = without_secrets(value) if isinstance(value, str) else value
    return shown


def _is_in_prefix(replica_id: str) -> bool:
    """Whether ``keepstep run`` begins the lines of this process with the name in ``replica_id``."""
    return name_of(replica_id) == Path(os.environ.get("KEEPSTEP_NAME_FILE", "")).name


class Logger:
    """Logs events with fields to a logger of ``logging``. ``fields``: of each event.

    The methods are named as those of ``logging``, and ``exc_info`` and ``stack_info`` mean what they mean there.
    """

    def __init__(self, logger: logging.Logger, fields: dict[str, Any] | None = None) -> None:
        self._logger = logger
        self._fields = fields or {}

    def bind(self, **fields: Any) -> Logger:
        """Return a logger that adds ``fields`` to each event."""
        return Logger(self._logger, {**self._fields, **fields})

    def debug(self, event: str, /, **fields: Any) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        self._log(logging.ERROR, event, {"exc_info": True, **fields})

    def _log(self, level: int, event: str, fields: dict[str, Any]) -> None:
        """Pass a line of text to the handlers, and the fields to keepstep's own formatter."""
        if not self._logger.isEnabledFor(level):
            return
        fields = {**self._fields, **fields}
        keep = {name: value for name in ("exc_info", "stack_info") if (value := fields.pop(name, None))}
        event, fields = without_secrets(event), _redacted(fields)
        shown = {name: value for name, value in fields.items() if name != "replica_id" or not _is_in_prefix(str(value))}
        text = event + "".join(f" {name}={value}" for name, value in shown.items())
        self._logger.log(level, printable(text), extra={"keepstep": (event, fields)}, stacklevel=3, **keep)


def get_logger(name: str) -> Logger:
    """Return the logger of a module: ``get_logger("keepstep.manager")``."""
    return Logger(logging.getLogger(name))


_BOLD, _CYAN, _MAGENTA, _PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[35m", "\x1b[0m"
_COLORS = {"debug": "\x1b[32m", "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
_EVENT_WIDTH = 40


def _line(event: dict[str, Any], *, colors: bool) -> str:
    """Return an event as a line for people, followed by its traceback."""

    def colored(text: str, color: str) -> str:
        return f"{color}{text}{_PLAIN}" if colors else text

    level = str(event.pop("level"))
    words = [
        str(event.pop("timestamp")),
        f"[{colored(f'{level:<9}', _COLORS.get(level, ''))}]",
        colored(f"{event.pop('event'):<{_EVENT_WIDTH}}", _BOLD),
        f"[{event.pop('logger')}]",
    ]
    more = [event.pop(name) for name in ("stack", "exception") if name in event]
    words += [f"{colored(name, _CYAN)}={colored(_value(one), _MAGENTA)}" for name, one in event.items()]
    return "\n".join([" ".join(words), *more])


def _value(value: object) -> str:
    return value if isinstance(value, str) and not re.search(r"[\s=\"']", value) else repr(value)


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
        return _line(shown, colors=self._colors)


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
