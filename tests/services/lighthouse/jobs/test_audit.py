"""Orders and refusals leave a trace that says who it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from keepstep.session.lighthouse_session import LighthouseSession
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.net.http import client_session
from keepstep_mesh.protocol.messages import Welcome
from keepstep_mesh.security.tokens import Role, Token, Tokens
from tests.support.network.certificates import Authority
from tests.support.services.lighthouse_driver import connection, lighthouse, worker

WORKER, ADMIN = "worker-" * 3, "admin-" * 4
TOKENS = Tokens(worker=WORKER, named=(Token(Role.ADMIN, ADMIN, "alice"),))
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
R0 = "/v1/jobs/job/replicas/r0"


class Trail:
    """The lines of the audit log, as fields."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "keepstep.audit")
        self._caplog = caplog

    def of(self, kind: str) -> list[dict[str, Any]]:
        events = [one.keepstep for one in self._caplog.records if one.name == "keepstep.audit"]
        return [fields for event, fields in events if event == kind]


@pytest.fixture
def trail(caplog: pytest.LogCaptureFixture) -> Trail:
    return Trail(caplog)


@asynccontextmanager
async def worker_of(address: str, token: str = WORKER) -> AsyncIterator[None]:
    async with connection(address, Authorization=f"Bearer {token}") as one:
        await one.hello()
        await one.next(Welcome)
        yield


async def test_an_order_is_in_the_event_log_under_the_name_of_token_and_certificate(
    tmp_path: Path, trail: Trail
) -> None:
    authority = Authority(tmp_path)
    context = authority.client("ops").client_context()
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(lighthouse(tokens=TOKENS, tls=authority.service(mutual=True)))
        settings = SessionSettings((one.address,), "job", "r0:1", WORKER, tls=authority.client("trainer"))
        session = LighthouseSession(settings, lambda _: None)
        await session.start()
        stack.push_async_callback(session.close)
        http = await stack.enter_async_context(client_session(ADMIN, tls=context))
        who = "admin alice (certificate ops) at 127.0.0.1"
        for order, body in (("drain", {"reason": "kernel"}), ("evict", {"reason": "bad GPU"}), ("readmit", {})):
            async with http.post(f"{one.address}{R0}/{order}", json=body) as response:
                assert response.status == 202
                assert (await response.json())["detail"]["by"] == who
        async with http.get(f"{one.address}/v1/jobs/job/events") as response:
            made = [event for event in (await response.json())["events"] if "by" in event["detail"]]
        assert [(event["kind"], event["detail"]["by"]) for event in made] == [
            (kind, who) for kind in ("drain", "evicted", "readmitted")
        ]
        assert [(entry["path"], entry["by"], entry["status"]) for entry in trail.of("order")] == [
            (f"{R0}/{order}", who, 202) for order in ("drain", "evict", "readmit")
        ]


async def test_an_order_that_came_to_nothing_is_in_the_audit_log_with_its_status(trail: Trail) -> None:
    async with lighthouse(tokens=TOKENS) as one, worker_of(one.address), client_session(ADMIN) as http:
        for path, body, status in (
            (f"{R0}/readmit", None, 409),
            (f"{R0}:1/straggler", {"steps": 9, "seconds": 0.5, "median_seconds": 0.1}, 409),
            ("/v1/jobs/job/replicas/nobody/drain", {"reason": "x"}, 404),
            (f"{R0}/evict", {"reason": "x", "ban_seconds": -1}, 400),
        ):
            async with http.post(one.address + path, json=body) as response:
                assert response.status == status
            assert trail.of("order")[-1] == {
                "by": "admin alice at 127.0.0.1",
                "method": "POST",
                "path": path,
                "status": status,
            }


async def test_reading_is_no_order(trail: Trail) -> None:
    async with lighthouse(tokens=TOKENS) as one, client_session(ADMIN) as http, http.get(f"{one.address}/v1/jobs"):
        pass
    assert trail.of("order") == trail.of("refused") == []


async def test_a_refused_caller_is_named_once_and_then_counted(trail: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    async with lighthouse(tokens=TOKENS) as one, worker_of(one.address):
        for token, status in ((WORKER, 403), (None, 401), ("wrong-" * 4, 401)):
            async with client_session(token) as http:
                for _ in range(3):
                    async with http.post(f"{one.address}{R0}/evict", json={"reason": "x"}) as response:
                        assert response.status == status
        assert [(entry["by"], entry["left_out"]) for entry in trail.of("refused")] == [("worker at 127.0.0.1", 0)]
        assert trail.of("refused")[0]["path"] == f"{R0}/evict"
        assert "it takes admin" in trail.of("refused")[0]["reason"]
        assert trail.of("order") == []
        async with client_session(ADMIN) as http, http.get(f"{one.address}/v1/jobs/job/events") as response:
            kinds = {event["kind"] for event in (await response.json())["events"]}
        assert kinds == {"joined"}


async def test_a_session_with_a_wrong_token_is_a_refusal_too(trail: Trail) -> None:
    async with lighthouse(tokens=TOKENS) as one:
        with pytest.raises(aiohttp.WSServerHandshakeError):
            async with worker_of(one.address, "wrong"):
                pass
        assert [entry["path"] for entry in trail.of("refused")] == ["/v1/jobs/job/session"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("http://10.0.0.7", 403),
        ("null", 403),
        ("http://[", 403),
        ("http://localhost:29530", 202),
        ("http://127.0.0.1:29530", 202),
    ],
)
async def test_without_tokens_a_web_page_from_elsewhere_may_not_order(origin: str, status: int) -> None:
    # The browser is on this machine, so listening on loopback does not keep its pages out.
    async with lighthouse() as one, worker(one.address), aiohttp.ClientSession(headers={"Origin": origin}) as http:
        async with http.post(f"{one.address}{R0}/drain", data='{"reason": "x"}') as response:
            assert response.status == status
        async with http.get(f"{one.address}/healthz") as response:
            assert response.status == 200
        async with http.get(f"{one.address}/v1/jobs/job/session", headers=UPGRADE) as response:
            assert response.status == (403 if status == 403 else 101)
