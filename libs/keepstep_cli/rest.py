"""The lighthouse's REST surface as the command uses it: fail over, follow redirects, turn every failure into advice."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from keepstep_cli.errors import Refused, Unreachable

TIMEOUT_SECONDS = 10.0
MAX_REDIRECTS = 3


def read_token(token_file: Path | None) -> str | None:
    """First line of the file, else KEEPSTEP_TOKEN, else None."""
    if token_file is None:
        return os.environ.get("KEEPSTEP_TOKEN") or None
    token = token_file.read_text().partition("\n")[0].strip()
    if not token:
        raise click.UsageError(f"{token_file} is empty; its first line must be the token")
    return token


class Lighthouse:
    """One of several lighthouses, whichever answers. ``addresses``: ``http://host:port``, comma separated."""

    def __init__(self, addresses: str, token: str | None) -> None:
        self._addresses = [
            (one if "//" in one else f"http://{one}").rstrip("/") for one in map(str.strip, addresses.split(",")) if one
        ]
        if not self._addresses:
            raise click.UsageError("--lighthouse is empty; it takes http://host:29510")
        self._token = token

    def get(self, path: str) -> Any:
        with self._open("GET", path, None) as response:
            return json.load(response)

    def post(self, path: str, body: dict[str, object]) -> Any:
        with self._open("POST", path, body) as response:
            return json.load(response)

    def follow(self, path: str) -> Iterator[Any]:
        """The data of server-sent events, until the lighthouse ends the stream."""
        with self._open("GET", path, None, timeout=None) as response:
            for line in response:
                if line.startswith(b"data:"):
                    yield json.loads(line[5:])

    def _open(
        self, method: str, path: str, body: dict[str, object] | None, timeout: float | None = TIMEOUT_SECONDS
    ) -> http.client.HTTPResponse:
        tried = []
        for address in self._addresses:
            try:
                return self._open_at(address + path, method, body, timeout)
            except urllib.error.HTTPError as error:
                with error:
                    raise Refused(_explain(error)) from error
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                tried.append(f"{address}: {reason or type(error).__name__}")
        raise Unreachable(
            "no lighthouse answers; tried\n  "
            + "\n  ".join(tried)
            + "\nStart one with `keepstep up`, or say where it is with --lighthouse or KEEPSTEP_LIGHTHOUSE."
        )

    def _open_at(
        self, url: str, method: str, body: dict[str, object] | None, timeout: float | None
    ) -> http.client.HTTPResponse:
        for _ in range(MAX_REDIRECTS):
            request = urllib.request.Request(url, method=method)  # noqa: S310 - http(s) only, checked below
            if request.type not in {"http", "https"}:
                raise click.UsageError(f"{url} is not an address of a lighthouse; it takes http://host:29510")
            if self._token:
                request.add_header("Authorization", f"Bearer {self._token}")
            if body is not None:
                request.add_header("Content-Type", "application/json")
                request.data = json.dumps(body).encode()
            try:
                response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310
                return response
            except urllib.error.HTTPError as error:
                # Mutations go to the leader: urllib follows a 307 for GET only.
                if error.code != 307 or "Location" not in error.headers:
                    raise
                url = urllib.parse.urljoin(url, error.headers["Location"])
                error.close()
        raise Unreachable(f"the lighthouses send one to another; the last was {url}: try again")


def _explain(error: urllib.error.HTTPError) -> str:
    """The problem document of RFC 9457 as one sentence, and advice where the token is the problem."""
    try:
        problem = json.load(error)
        said = str(problem.get("detail") or problem.get("title") or error.reason)
    except (ValueError, AttributeError):
        said = str(error.reason)
    advice = ""
    if error.code in {401, 403}:
        advice = "\nGive a token that may do this with --token-file or KEEPSTEP_TOKEN."
    return f"the lighthouse refuses ({error.code}): {said}{advice}"
