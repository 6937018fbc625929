"""Which ``Host`` and ``Origin`` a server without tokens answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_mesh.config.settings import Settings
from keepstep_mesh.security.web_pages import host_names, host_problem, origin_problem
from keepstep_mesh.serving.listen_settings import read_listen_settings

HERE = ("localhost", "LOCALHOST", "localhost.", "127.0.0.1", "127.8.9.1", "[::1]")
ELSEWHERE = (
    *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example.", "notlocalhost", "127.1"),
    *("10.0.0.1", "0.0.0.0", "[::]", "::1", "[::1", "evil.example@127.0.0.1", "127.0.0.1/evil", "127.0.0.1 x", "%"),
)


@pytest.mark.parametrize("port", ["", ":8080", ":80"])
def test_loopback_is_answered_on_any_port_and_nothing_else(port: str) -> None:
    for host in HERE:
        assert host_problem(host + port, ()) is None
        assert origin_problem(f"http://{host}{port}", ()) is None
    for host in ELSEWHERE:
        problem = host_problem(host + port, ())
        assert problem is not None, host
        assert "allow it with --allow-host" in problem
        assert origin_problem(f"http://{host}{port}", ()) is not None


def test_an_allowed_name_is_answered_and_those_below_it_are_not() -> None:
    allowed = host_names("Lab.Example, gpu-7,[fd00::7]")
    for host in ("lab.example", "LAB.example:443", "gpu-7:29530", "[fd00::7]:1", "127.0.0.1"):
        assert host_problem(host, allowed) is None
    assert origin_problem("https://lab.example", allowed) is None
    for host in ("x.lab.example", "example", "gpu-70"):
        assert host_problem(host, allowed) is not None
    assert origin_problem("https://x.lab.example", allowed) is not None


@pytest.mark.parametrize("origin", ["null", "file://", "https://evil.example", "http://localhost.evil.example:80", "x"])
def test_an_origin_that_is_not_of_this_machine_is_refused(origin: str) -> None:
    assert origin_problem(origin, ()) is not None


def test_a_request_without_a_host_comes_from_no_browser() -> None:
    assert host_problem(None, ()) is host_problem("", ()) is origin_problem(None, ()) is None


@given(st.text(max_size=40))
def test_any_text_is_judged_without_an_error(text: str) -> None:
    for judge in (host_problem, origin_problem):
        problem = judge(text, ())
        assert problem is None or len(problem) < 400


def test_allowed_names_come_from_flag_and_environment_and_are_checked() -> None:
    assert read_listen_settings(Settings({}, {}), "relay", ":0")["allow_host"] == ()
    environ = {"KEEPSTEP_RELAY_ALLOW_HOST": "a.example,b"}
    assert read_listen_settings(Settings({}, environ), "relay", ":0")["allow_host"] == ("a.example", "b")
    flags = {"relay_allow_host": "c"}
    assert read_listen_settings(Settings(flags, environ), "relay", ":0")["allow_host"] == ("c",)
    for bad in ("http://a", "a:80", "a,,b", "*"):
        with pytest.raises(ValueError, match="allow_host: invalid host name"):
            host_names(bad)
