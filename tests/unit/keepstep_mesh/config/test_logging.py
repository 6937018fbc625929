"""Logs: the same events as text, as JSON and for people, and never a token in them."""

from __future__ import annotations

import io
import json
import logging

import pytest
import structlog

from keepstep_mesh.config.logging import HIDDEN, configure, get_logger, hide

SECRET = "a-token-that-nobody-may-see"


def _fail(text: str) -> None:
    raise RuntimeError(text)


pytestmark = pytest.mark.usefixtures("restored_logging")


@pytest.fixture
def lines():
    """Configures JSON logs; gives what was written so far, parsed."""
    stream = io.StringIO()
    configure("debug", as_json=True, stream=stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_object_with_its_fields(lines) -> None:
    get_logger("keepstep.x").bind(replica_id="r0").warning("member lost", quorum_id=3)
    (event,) = lines()
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "level": "warning",
        "logger": "keepstep.x",
        "event": "member lost",
        "replica_id": "r0",
        "quorum_id": 3,
    }


def test_a_line_under_keepstep_run_leaves_out_the_name_that_its_prefix_has(monkeypatch, caplog) -> None:
    monkeypatch.setenv("KEEPSTEP_NAME_FILE", "/tmp/names/r0")
    for replica_id in ("r0:7e0c", "train_ddp_1:7e0c"):
        get_logger("keepstep.x").warning("waiting for a quorum", replica_id=replica_id, reason="r1 heals")
    assert [one.getMessage() for one in caplog.records] == [
        "waiting for a quorum reason=r1 heals",
        "waiting for a quorum replica_id=train_ddp_1:7e0c reason=r1 heals",
    ]


def test_logs_of_libraries_and_of_plain_structlog_look_the_same(lines) -> None:
    logging.getLogger("aiohttp.server").error("it %s", "broke")
    structlog.get_logger("keepstep.y").info("step done", step=4)
    assert [(one["level"], one["event"]) for one in lines()] == [("error", "it broke"), ("info", "step done")]
    assert lines()[1]["step"] == 4


def test_a_line_for_people_has_its_fields_and_the_traceback_below() -> None:
    stream = io.StringIO()
    configure("debug", as_json=False, stream=stream)
    try:
        _fail("deep down")
    except RuntimeError:
        get_logger("keepstep.x").bind(rank=3).exception("request failed", reason="it broke", source="r1")
    first, *rest = stream.getvalue().splitlines()
    event = "request failed".ljust(40)
    assert first[24:] == f" [error    ] {event} [keepstep.x] rank=3 reason='it broke' source=r1"
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-1] == "RuntimeError: deep down"


def test_a_traceback_is_part_of_the_event(lines) -> None:
    try:
        _fail("deep down")
    except RuntimeError:
        get_logger("keepstep.x").exception("request failed")
    (event,) = lines()
    assert "RuntimeError: deep down" in event["exception"]


def test_a_value_that_json_does_not_have_is_written_as_text(lines) -> None:
    get_logger("keepstep.x").info("odd", value={1, 2}.__class__, percent="100 %s")
    assert lines()[0]["value"] == "<class 'set'>"
    assert lines()[0]["percent"] == "100 %s"


def test_events_below_the_level_are_dropped() -> None:
    stream = io.StringIO()
    configure("warning", as_json=True, stream=stream)
    get_logger("keepstep.x").info("quiet")
    assert stream.getvalue() == ""


def test_no_token_is_ever_written(lines) -> None:
    hide(SECRET)
    log = get_logger("keepstep.x")
    log.info("hello", token=SECRET, detail=f"sent {SECRET} along")
    log.info(SECRET, headers="authorization: Bearer unknown-but-clearly-one")
    logging.getLogger("aiohttp").info("GET / with %s", SECRET)
    try:
        _fail(SECRET)
    except RuntimeError:
        log.exception("failed")
    text = json.dumps(lines())
    assert SECRET not in text
    assert "unknown-but-clearly-one" not in text
    assert text.count(HIDDEN) >= 5


def test_that_a_token_is_needed_is_no_secret(lines) -> None:
    get_logger("keepstep.x").info("hello", tokens_needed=True)
    assert lines()[0]["tokens_needed"] is True


def test_configuring_again_replaces_what_was() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("info", as_json=True, stream=first)
    configure("info", as_json=False, stream=second)
    get_logger("keepstep.x").info("once", step=1)
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="expected debug"):
        configure("loud")


def test_in_a_process_that_configures_nothing_events_are_plain_logging(caplog) -> None:
    with caplog.at_level("INFO", "keepstep.z"):
        get_logger("keepstep.z").info("healed", step=4, rate="50%")
    assert caplog.records[0].getMessage() == "healed step=4 rate=50%"


EVIL = "gone\x1b[2J\n2026 all is well\x9b31m\u202e"


def test_a_line_of_json_has_no_character_that_a_terminal_obeys_and_keeps_the_value(lines) -> None:
    stream = io.StringIO()
    configure("debug", as_json=True, stream=stream)
    get_logger("keepstep.x").warning("left", reason=EVIL + "ü")
    line = stream.getvalue()
    assert line.removesuffix("\n").isprintable()
    assert "ü" in line
    assert json.loads(line)["reason"] == EVIL + "ü"


def test_a_line_for_people_has_no_character_that_a_terminal_obeys() -> None:
    stream = io.StringIO()
    configure("debug", as_json=False, stream=stream)
    get_logger("keepstep.x").warning(f"left {EVIL}", reason=EVIL)
    logging.getLogger("aiohttp.server").error("invalid request %s", EVIL.replace("\n", ""))
    first, second = stream.getvalue().splitlines()
    assert first.isprintable()
    assert second.isprintable()
    assert r"left gone\x1b[2J\n2026" in first


def test_a_process_that_configures_nothing_logs_no_character_that_a_terminal_obeys(caplog) -> None:
    get_logger("keepstep.x").warning("left", reason=EVIL)
    assert caplog.messages[0].isprintable()
