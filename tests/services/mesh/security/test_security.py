"""docs/security.md with real processes: its commands work as they stand, and no secret shows anywhere."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from keepstep.session.lighthouse_session import LighthouseSession
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.net.http import client_session
from keepstep_mesh.security.tls import TlsFiles
from tests.support.services.asking_group import quorum_request
from tests.support.services.command import environment

DEADLINE = 60.0
DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "security.md"

RANK = """
import asyncio, os, signal
from keepstep_mesh.config import logging
from keepstep_mesh.security.tokens import ClientToken
from keepstep.session.lighthouse_session import LighthouseSession
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.config.settings import split_addresses
from keepstep_mesh.security.tls import tls_of_client

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, (stop := asyncio.Event()).set)
    settings = SessionSettings(
        split_addresses(os.environ["KEEPSTEP_LIGHTHOUSE"]), "default", "r0:1", ClientToken(), tls=tls_of_client()
    )
    session = LighthouseSession(settings, lambda _: None)
    await session.start()
    print("in session over", session.lighthouse.partition(":")[0], "with", *sorted(
        name for name in os.environ if name.startswith(("KEEPSTEP_T", "KEEPSTEP_TLS"))), flush=True)
    await stop.wait()
    await session.leave("done", 10)
    await session.close()

logging.configure("debug")
asyncio.run(main(), debug=True)
"""


@dataclass(frozen=True)
class Made:
    """Files that the commands of the document created."""

    folder: Path

    def file(self, name: str) -> str:
        return str(self.folder / name)

    def token(self, name: str) -> str:
        return (self.folder / f"{name}.token").read_text().strip()

    def client(self) -> TlsFiles:
        return TlsFiles(*(self.folder / name for name in ("trainer.pem", "trainer.key", "ca.pem")))

    def secrets(self) -> set[str]:
        """Tokens, and the lines of private keys."""
        keys = {line for key in self.folder.glob("*.key") for line in key.read_text().splitlines() if "-" not in line}
        assert len(keys) >= 6
        return {self.token("worker"), self.token("alice"), *keys}

    def variables(self, **more: str) -> dict[str, str]:
        """The environment of a client."""
        files = {"CERT": "trainer.pem", "KEY": "trainer.key", "CA": "ca.pem"}
        ours = {f"KEEPSTEP_TLS_{name}": self.file(file) for name, file in files.items()}
        return environment(**ours | more)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("security")
    for commands in re.findall(r"^```sh\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL):
        done = subprocess.run(["bash", "-euc", commands], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return Made(folder)


class Output:
    """A process, and everything that it prints."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.text = ""
        self._more = asyncio.Event()

    async def read(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            self.text += line.decode()
            self._more.set()

    async def said(self, text: str) -> None:
        """Waits until it has printed ``text``."""
        async with asyncio.timeout(DEADLINE):
            while text not in self.text:
                self._more.clear()
                await self._more.wait()


@asynccontextmanager
async def started(made: Made, *arguments: str, **variables: str) -> AsyncIterator[Output]:
    """A `keepstep` command; ended at the end, and then all of its output is there."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-m", "keepstep_cli", *arguments),  # no fork server: the test reads its command line
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=made.variables(**variables),
    )
    output = Output(process)
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(2 * DEADLINE), asyncio.TaskGroup() as readers:
        readers.create_task(output.read(process.stdout))
        readers.create_task(output.read(process.stderr))
        try:
            yield output
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def url_of(service: Output) -> str:
    await service.said("lighthouse https://")
    found = re.search(r"^lighthouse (\S+)$", service.text, re.MULTILINE)
    assert found is not None
    return found[1]


async def keepstep(made: Made, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit code and all that a `keepstep` command says."""
    async with started(made, *arguments, **variables) as output:
        await output.process.wait()
    assert output.process.returncode is not None
    return output.process.returncode, output.text


def lighthouse(made: Made, *flags: str) -> tuple[str, ...]:
    """As the document starts it, but on loopback."""
    files = ("--tls-cert", "lighthouse.pem"), ("--tls-key", "lighthouse.key"), ("--tls-ca", "ca.pem")
    given = [word for flag, file in (("--token-file", "tokens"), *files) for word in (flag, made.file(file))]
    return ("lighthouse", "--bind", "127.0.0.1:0", *given, *flags)


async def test_the_commands_of_the_document_make_a_mesh_that_works(made: Made) -> None:
    assert {path.stat().st_mode & 0o077 for path in made.folder.glob("*.key")} == {0}
    async with started(made, *lighthouse(made)) as service:
        url = await url_of(service)
        assert url.startswith("https://127.0.0.1:")
        at = ("--lighthouse", url.replace("127.0.0.1", "localhost"))
        settings = SessionSettings((url,), "default", "r3:1", made.token("worker"), tls=made.client())
        session = LighthouseSession(settings, lambda _: None)
        await session.start()
        await session.quorum(quorum_request())
        token = ("--token-file", made.file("alice.token"))
        code, text = await keepstep(made, "replicas", "--json", *at, *token)
        assert (code, json.loads(text)["replicas"][0]["replica_id"]) == (0, "r3:1")
        code, text = await keepstep(made, "drain", "r3", "--yes", *at, *token)
        assert code == 0, text
        code, text = await keepstep(made, "events", *at, *token)
        assert "admin alice (certificate trainer) at 127.0.0.1" in " ".join(text.split())
        await session.close()

        # Each thing that the document says is needed is needed.
        for arguments, variables, expected, says in (
            ((), {}, 4, "a token is needed"),
            (
                token,
                {"KEEPSTEP_TLS_CA": ""},
                3,
                "not from a CA that is trusted here; give that CA with KEEPSTEP_TLS_CA",
            ),
            (token, {"KEEPSTEP_TLS_CERT": "", "KEEPSTEP_TLS_KEY": ""}, 3, "give one that its CA signed"),
            (("--tls-ca", made.file("trainer.pem")), {}, 3, "not from a CA that is trusted here"),
            (("--tls-ca", made.file("tokens")), {}, 2, "holds no CA certificate"),
            (("--tls-cert", made.file("none.pem")), {}, 2, "none.pem cannot be read: No such file"),
            (("--lighthouse", url.replace("https", "http")), {}, 3, "if it speaks TLS, write https://"),
        ):
            code, text = await keepstep(made, "status", *at, *arguments, **variables)
            assert code == expected, text
            assert "keepstep up" not in text, "a lighthouse answers"
            assert says in " ".join(text.split())


async def test_a_lighthouse_whose_files_are_bad_says_so_and_does_not_start(made: Made) -> None:
    for flag, file, expected in (
        ("--tls-cert", "none.pem", 2),
        ("--tls-key", "trainer.key", 1),
        ("--token-file", "none", 2),
    ):
        code, text = await keepstep(made, *lighthouse(made), flag, made.file(file))
        assert code == expected
        assert file in text
        assert "Traceback" not in text


def cmdlines(process: asyncio.subprocess.Process) -> str:
    """Return the lines of ``ps`` for it and for all that it started."""
    root = psutil.Process(process.pid)
    return "\n".join(" ".join(one.cmdline()) for one in (root, *root.children(recursive=True)))


async def bodies_of_bad_requests(made: Made, url: str) -> str:
    """Return the answers of the lighthouse to wrong requests, and its metrics."""
    port, alice = int(url.rpartition(":")[2]), made.token("alice")
    said = []
    for line in (f"Authorization: Bearer {alice}\x01", f"Authorization : Bearer {alice}", f"Bearer {alice}"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=made.client().client_context())
        writer.write(f"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n".encode())
        async with asyncio.timeout(DEADLINE):
            said.append((await reader.readline()).decode())
        writer.transport.abort()
    for token in (alice, made.token("worker"), f"{alice}x"):
        async with client_session(token, tls=made.client().client_context()) as http:
            for method, path in (
                ("GET", "/metrics"),
                ("GET", "/v1/cluster"),
                ("GET", "/v1/jobs/default"),
                ("GET", "/v1/jobs/nothing"),
                ("POST", "/v1/jobs/default/replicas/r0/evict"),
                ("POST", "/v1/jobs/default/replicas/r9/drain"),
            ):
                async with http.request(method, url + path, data=f'{{"reason": 1, "{method}": 2}}') as response:
                    said.append(await response.text())
    return "\n".join(said)


async def test_no_secret_shows_in_anything_that_is_said_or_shown(made: Made, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    tokens = tmp_path / "tokens"
    tokens.write_text((made.folder / "tokens").read_text())
    events = tmp_path / "events.jsonl"
    flags = ("--log-level", "debug", "--event-log", str(events), "--token-file", str(tokens))
    seen = []
    async with started(made, *lighthouse(made, *flags), PYTHONASYNCIODEBUG="1") as service:
        url = await url_of(service)
        words = ("--lighthouse", url, "--token-file", made.file("worker.token"), "--replicas", "1")
        async with started(made, "run", *words, "--", str(tmp_path / "rank.py")) as job:
            names = "KEEPSTEP_TLS_CA KEEPSTEP_TLS_CERT KEEPSTEP_TLS_KEY KEEPSTEP_TOKEN_FILE"
            await job.said(f"[r0/0] in session over https with {names}\n")
            seen += [cmdlines(service.process), cmdlines(job.process), await bodies_of_bad_requests(made, url)]
            at = ("--lighthouse", url)
            for arguments, variables in (
                (("status",), {"KEEPSTEP_TOKEN": made.token("worker")}),
                (("drain", "r0", "--yes"), {"KEEPSTEP_TOKEN": made.token("worker")}),
                (("evict", "r0", "--ban", "1h"), {"KEEPSTEP_TOKEN": f"{made.token('alice')}x"}),
                (("readmit", "r0"), {"KEEPSTEP_TOKEN_FILE": made.file("alice.token")}),
                (("events",), {"KEEPSTEP_TOKEN_FILE": made.file("alice.token")}),
            ):
                seen.append((await keepstep(made, *arguments, *at, **variables))[1])
            tokens.write_text(f"worker = {made.token('worker')}\nadmin {made.token('alice')}\n")
            service.process.send_signal(signal.SIGHUP)
            await service.said("the old one still counts")
        seen.append(job.text)
    seen += [service.text, events.read_text()]
    assert '"refused"' in service.text
    assert '"order"' in service.text
    assert '"level": "debug"' in service.text
    assert '"kind": "joined"' in seen[-1]
    found = [(place, secret[:4]) for place, text in enumerate(seen) for secret in made.secrets() if secret in text]
    assert not found
