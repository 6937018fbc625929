"""Several lighthouses that talk to each other over mutual TLS and with tokens."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from keepstep.session.lighthouse_session import LighthouseSession
from keepstep.session.session_settings import SessionSettings
from keepstep_lighthouse.settings import LighthouseSettings, read_settings
from keepstep_mesh.net.http import client_session, leader_of
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.security.tokens import Tokens, watched_tokens
from tests.support.network.certificates import Authority
from tests.support.services.asking_group import quorum_request
from tests.support.services.etcd_server import EtcdCluster
from tests.support.services.lighthouse_driver import DEADLINE, eventually, lighthouse

WORKER, ADMIN, OLD, NEW = "worker-" * 3, "admin-" * 4, "old-" * 5, "new-" * 5


async def test_a_standby_is_linked_to_the_leader_and_sends_workers_there_over_tls(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    authority, file = Authority(tmp_path), tmp_path / "tokens"
    file.write_text(f"worker = {WORKER}\nservice = {OLD}\nadmin = {ADMIN}\n")
    tls, tokens = authority.service(mutual=True), watched_tokens({}, file)
    one_mesh = {"store": f"{etcd.address}/{uuid.uuid4()}", "tls": tls, "peer_tls": tls, "tokens": tokens}
    async with lighthouse(**one_mesh) as leader, lighthouse(**one_mesh) as standby:
        await eventually(lambda: len(leader.followers) == 1)
        client = authority.client()
        session = LighthouseSession(
            SessionSettings((standby.address,), "job", "r0:1", WORKER, DEADLINE, tls=client), lambda _: None
        )
        await session.start()
        assert session.lighthouse == leader.address
        first = await session.quorum(quorum_request(0))

        url = f"{standby.address}/v1/jobs/job"
        async with client_session(WORKER, tls=client.client_context()) as http:
            async with http.get(url) as answer:
                assert (answer.status, (await answer.json())["members"]) == (200, 1)
            async with http.patch(url, json={"min_replicas": 2}, allow_redirects=False) as answer:
                assert answer.status == 403
        async with (
            client_session(ADMIN, tls=client.client_context()) as http,
            http.patch(url, json={"min_replicas": 2}, allow_redirects=False) as answer,
        ):
            assert leader_of(answer) == leader.address

        await leader.stop()
        second = await session.quorum(quorum_request(1))
        assert session.lighthouse == standby.address
        assert second.quorum_id >= first.quorum_id

        # The next link shows the token of the moment.
        file.write_text(f"worker = {WORKER}\nservice = {NEW}\n")
        tokens.refresh()
        async with lighthouse(**one_mesh):
            await eventually(lambda: len(standby.followers) == 1)
        await session.close()


async def test_a_standby_that_the_leader_refuses_names_the_remedy(
    etcd: EtcdCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    tls, store = authority.service(), f"{etcd.address}/{uuid.uuid4()}"
    tokens = Tokens(worker=WORKER, service=OLD)
    for changes, says in (
        ({"peer_tls": other.trusted()}, "not from a CA that is trusted here"),
        ({"tokens": Tokens(worker=WORKER)}, "a token is needed"),
    ):
        caplog.clear()
        settings = {"store": store, "tls": tls, "peer_tls": authority.trusted(), "tokens": tokens}
        async with lighthouse(**settings), lighthouse(**settings | changes):
            await eventually(lambda: "no link to the leader" in caplog.text)
            assert says in caplog.text


def test_lighthouses_show_each_other_a_service_token_else_an_admin_one() -> None:
    assert Tokens(WORKER, OLD, NEW).for_services() == OLD
    assert Tokens(WORKER, admin=NEW).for_services() == NEW
    assert Tokens(WORKER).for_services() is None


def test_the_certificates_of_links_are_those_of_a_client_else_its_own() -> None:
    def read(**environ: str) -> LighthouseSettings:
        return read_settings({"tls_cert": Path("l.pem"), "tls_ca": Path("ca.pem")}, environ)

    assert read().peer_tls == TlsFiles(Path("l.pem"), ca=Path("ca.pem"))
    assert read(KEEPSTEP_TLS_CA="other.pem").peer_tls == TlsFiles(ca=Path("other.pem"))


def test_an_address_to_advertise_has_the_scheme_that_is_spoken() -> None:
    certificate = {"tls_cert": Path("l.pem")}
    assert read_settings({"advertise": "l1:29510", **certificate}, {}).advertise == "https://l1:29510"
    assert read_settings({"advertise": "l1:29510"}, {}).advertise == "http://l1:29510"
    assert read_settings(certificate, {"KEEPSTEP_LIGHTHOUSE_ADVERTISE": "http://l1:1/"}).advertise == "http://l1:1"
    assert read_settings({}, {}).advertise is None
