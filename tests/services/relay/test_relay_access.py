"""Access to the routes of a relay, its description, and its registration."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path
from typing import Any

import aiohttp
import openapi_spec_validator
import pytest
from jsonschema import Draft202012Validator

from keepstep_mesh.net.http import client_session
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.security.tokens import Tokens
from keepstep_mesh.serving.service import all_routes
from keepstep_relay.app import Relay
from keepstep_relay.settings import RelaySettings, read_settings
from tests.support.network.certificates import Authority
from tests.support.services.access_table import ASKERS, TOKENS, check_access
from tests.support.services.lighthouse_driver import lighthouse
from tests.support.services.relay_driver import DEADLINE, Client, client, relay, state

ONE = state(1, 1000)
CHECKPOINTS = "/v1/jobs/{job}/checkpoints"
ID = f"{CHECKPOINTS}/{{id}}"
ALL = "worker service admin"
ACCESS = {
    ("GET", "/healthz"): "anybody",
    ("GET", "/readyz"): "anybody",
    ("GET", "/openapi.json"): "anybody",
    ("GET", "/metrics"): ALL,
    ("GET", CHECKPOINTS): ALL,
    ("POST", CHECKPOINTS): "worker admin",
    ("GET", ID): ALL,
    ("DELETE", ID): "admin",
    ("POST", f"{ID}/plan"): "worker admin",
    ("POST", f"{ID}/result"): "worker admin",
    ("POST", f"{ID}/commit"): "worker admin",
    ("POST", f"{ID}/abort"): "worker admin",
    ("PUT", f"{ID}/layout"): "worker admin",
    ("GET", f"{ID}/layouts"): "worker admin",
    ("GET", f"{ID}/layouts/{{digest}}"): "worker admin",
    ("GET", f"{ID}/state"): "worker admin",
    ("GET", f"{ID}/manifest"): ALL,
    ("PUT", f"{ID}/manifest"): "worker admin",
    ("GET", f"{ID}/holders"): ALL,
    ("PUT", f"{ID}/holders/{{name}}"): "worker admin",
    ("GET", f"{ID}/packs/{{rank}}"): ALL,
    ("GET", f"{ID}/"): ALL,
    ("HEAD", f"{ID}/.metadata"): ALL,
    ("GET", f"{ID}/.metadata"): ALL,
    ("HEAD", f"{ID}/__{{rank}}_{{version}}.distcp"): ALL,
    ("GET", f"{ID}/__{{rank}}_{{version}}.distcp"): ALL,
    ("HEAD", "/v1/chunks/{digest}"): ALL,
    ("GET", "/v1/chunks/{digest}"): ALL,
    ("PUT", "/v1/chunks/{digest}"): "worker admin",
}


def url_of(path: str) -> str:
    return path.format(job="job", id="c1", name="r7", rank=0, version=0, digest=ONE.digests[0])


def test_the_table_has_every_route() -> None:
    routes = [(one.method, one.path) for one in all_routes(Relay(RelaySettings()).service())]
    assert sorted(routes) == sorted(ACCESS)


@pytest.mark.parametrize("asker", ASKERS)
async def test_each_route_lets_in_whom_the_table_says_and_nobody_else(asker: str) -> None:
    async with relay(tokens=TOKENS) as one:
        await check_access(ACCESS, asker, one.address, url_of)
        assert not one.core.checkpoints


BODIES: dict[tuple[str, str], Any] = {
    ("POST", CHECKPOINTS): {"id": "c1", "step": 1},
    ("PUT", f"{ID}/layout"): ONE.pack,
    ("GET", f"{ID}/layouts/{{digest}}"): None,  # until the commit
    ("POST", f"{ID}/plan"): {"producer": "r0", "root": ONE.root},
    ("PUT", f"{ID}/manifest"): ONE.manifest,
    ("PUT", "/v1/chunks/{digest}"): ONE.pack,
    ("PUT", f"{ID}/holders/{{name}}"): {"address": "http://a:1", "has": "01"},
    ("POST", f"{ID}/result"): {},
    ("POST", f"{ID}/commit"): None,
    ("DELETE", ID): None,
    ("POST", f"{ID}/abort"): {"reason": "x"},
}
"""Of everything that changes something, in an order in which it can be carried out."""


async def test_the_description_is_openapi_and_every_answer_is_as_it_says() -> None:
    async with relay() as one, client(one.address) as asking:
        document = await asking.call("GET", "/openapi.json")
        openapi_spec_validator.validate(document)
        described = {(method.upper(), path) for path, of in document["paths"].items() for method in of}
        assert described == set(ACCESS)
        for schema in document["components"]["schemas"].values():
            schema.setdefault("additionalProperties", False)
        changes = [*BODIES, ("POST", CHECKPOINTS)]
        changes.append(changes.pop(changes.index(("POST", f"{ID}/abort"))))
        reads = [of for of in ACCESS if of not in BODIES]
        asked = [*changes[:-3], *reads, *changes[-3:]]
        assert set(asked) == set(ACCESS)
        for method, path in asked:
            operation = document["paths"][path][method.lower()]
            named = [of["name"] for of in operation.get("parameters", []) if of["in"] == "path"]
            assert named == re.findall(r"\{(\w+)\}", path)
            roles = ACCESS[method, path]
            assert ("security" in operation) == (roles != "anybody")
            assert roles == "anybody" or path == "/metrics" or operation["x-roles"] == sorted(roles.split())
            body = BODIES.get((method, path))
            if isinstance(body, dict):
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                Draft202012Validator({**schema, "components": document["components"]}).validate(body)
            how: Any = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
            async with asking.http.request(method, one.address + url_of(path), **how) as answer:
                assert str(answer.status) in operation["responses"], (method, path, await answer.text())
                content = operation["responses"][str(answer.status)].get("content", {})
                if "application/json" in content:
                    schema = content["application/json"]["schema"]
                    Draft202012Validator({**schema, "components": document["components"]}).validate(await answer.json())
                elif content:
                    assert answer.content_type in content


async def test_a_problem_says_what_is_wrong_for_every_route() -> None:
    async with relay() as one, client(one.address) as asking:
        for method, path in ACCESS:
            async with asking.http.request(method, one.address + url_of(path), json=None) as answer:
                if answer.status >= 400 and method != "HEAD":
                    assert answer.content_type == "application/problem+json", (method, path)
                    assert (await answer.json(content_type=None))["detail"]


async def test_a_relay_registers_and_says_goodbye() -> None:
    tokens = Tokens(worker="w" * 16, service="s" * 16)
    async with lighthouse(tokens=tokens) as known, aiohttp.ClientSession() as http:

        async def services() -> list[dict[str, Any]]:
            headers = {"Authorization": f"Bearer {tokens.worker}"}
            async with http.get(f"{known.address}/v1/cluster", headers=headers) as answer:
                found: list[dict[str, Any]] = (await answer.json())["services"]
                return found

        async with relay(lighthouses=(known.address,), name="relay-1", tokens=tokens) as one:
            async with asyncio.timeout(DEADLINE):
                while not (found := await services()):  # noqa: ASYNC110 - nothing tells it
                    await asyncio.sleep(0.01)
            assert (found[0]["kind"], found[0]["name"], found[0]["address"]) == ("relay", "relay-1", one.address)
            assert one.is_registered
        assert await services() == []


async def test_with_tls_it_speaks_https_and_its_bytes_are_the_same(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = TlsFiles(cert=authority.certificate("127.0.0.1"))
    big = state(2, 9 << 20)
    async with (
        relay(tls=tls) as one,
        client_session(tls=TlsFiles(ca=authority.pem).client_context()) as http,
    ):
        assert one.address.startswith("https://")
        worker = Client(http, one.address)
        await worker.store(big)
        assert await worker.pack() == big.pack


def test_settings_come_from_flags_and_environment(tmp_path: Path) -> None:
    environ = {
        "KEEPSTEP_RELAY_MEMORY": "2GiB",
        "KEEPSTEP_RELAY_DATA_DIR": str(tmp_path),
        "KEEPSTEP_RELAY_UPLOAD_TIMEOUT": "2m",
        "KEEPSTEP_RELAY_KEEP_LIVE": "9",
        "KEEPSTEP_LIGHTHOUSE": "a:1,b:2",
    }
    read = read_settings({"memory": None, "keep_live": 7}, environ)
    assert (read.memory, read.data_dir) == (2 << 30, tmp_path)
    assert (read.limits.keep_live, read.limits.upload_seconds) == (7, 120.0)
    assert read.lighthouses == ("http://a:1", "http://b:2")
    wrong = (
        ({"memory": 5}, "at least 64 MiB"),
        ({"upload_timeout": 0.0}, "more than 0"),
        ({"durable_ttl": 7.0}, "a day"),
    )
    for flags, words in wrong:
        with pytest.raises(ValueError, match=words):
            read_settings(flags, {})
    with pytest.raises(ValueError, match="KEEPSTEP_RELAY_MEMORY"):
        read_settings({}, {"KEEPSTEP_RELAY_MEMORY": "much"})
