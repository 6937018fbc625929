"""A real chromium without a window, steered by its DevTools protocol: no more is needed than aiohttp."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE = 60.0
CLOSE_SECONDS = 10.0
NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, and open only pages of our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Page:
    """One tab, with its requests, console messages, and exceptions."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser = browser
        self.context = context
        self._session = session
        self.requests: list[str] = []
        self.unanswered: dict[str, str] = {}
        """Addresses of requests whose answer has not ended, by their ids."""
        self.complaints: list[str] = []
        """Exceptions, errors and warnings of the console, and violations of the security policy."""
        self.loaded = asyncio.Event()
        self.cut_off = False
        """Whether chromium dropped a request because a network interface of this machine came or went."""

    async def tell(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.tell(method, self._session, **params)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
            self.unanswered[params["requestId"]] = params["request"]["url"]
        elif method in {"Network.loadingFinished", "Network.loadingFailed"}:
            self.unanswered.pop(params["requestId"], None)
            self.cut_off |= params.get("errorText") == NETWORK_CHANGED
        elif method == "Page.loadEventFired":
            self.loaded.set()
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
            self.complaints.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            text = f"{params['entry']['source']}: {params['entry']['text']} {params['entry'].get('url')}"
            self.complaints += [text] if NETWORK_CHANGED not in text else []

    async def load(self, url: str) -> None:
        """Open a page and wait until it has loaded. Repeat what another test spoiled that made a network interface."""
        await self.tell("Page.navigate", url=url)
        await self._until_loaded()
        while self.cut_off:
            self.cut_off = False
            self.complaints.clear()
            await self.tell("Page.reload")
            await self._until_loaded()

    async def _until_loaded(self) -> None:
        async with asyncio.timeout(DEADLINE):
            await self.loaded.wait()
            while self.loaded.is_set():  # again if it was the blank page of the new tab
                self.loaded.clear()
                if await self.run("location.href") == "about:blank":
                    await self.loaded.wait()

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = await self.tell("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Waits, looking whenever the page draws, until a JavaScript expression is true; gives its value."""
        look = f"let found; try {{ found = {condition} }} catch {{ }}; if (found) resolve(found)"
        promise = f"new Promise((resolve) => {{ const look = () => {{ {look}; else setTimeout(look, 20) }}; look() }})"
        try:
            async with asyncio.timeout(DEADLINE):
                return await self.run(promise)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"never true: {condition}; complaints: {self.complaints}; page:\n{text}") from None

    async def calls_until(self, act: Callable[[], object], condition: str) -> int:
        """Act, wait until the condition is true, and return how many calls of functions the page has made for it."""
        await self.tell("Profiler.enable")
        await self.tell("Profiler.startPreciseCoverage", callCount=True, detailed=False)
        act()
        await self.until(condition)
        scripts = (await self.tell("Profiler.takePreciseCoverage"))["result"]
        await self.tell("Profiler.disable")
        return sum(function["ranges"][0]["count"] for script in scripts for function in script["functions"])

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.tell("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def memory(self) -> tuple[int, int]:
        """Bytes of its JavaScript heap, and its DOM nodes, when all that can go has gone."""
        await self.tell("HeapProfiler.collectGarbage")
        heap, counts = await self.tell("Runtime.getHeapUsage"), await self.tell("Memory.getDOMCounters")
        return heap["usedSize"], counts["nodes"]

    async def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            await self.tell(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    async def drag(self, x: float, y: float, to: float) -> None:
        for kind, at in (("mousePressed", x), ("mouseMoved", (x + to) / 2), ("mouseMoved", to), ("mouseReleased", to)):
            await self.tell("Input.dispatchMouseEvent", type=kind, x=at, y=y, button="left", buttons=1, clickCount=1)

    async def screenshot(self, file: Path, *, whole: bool = False) -> None:
        answer = await self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(answer["data"]))


class Browser:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._contexts: list[str] = []

    async def tell(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(
            {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        )
        async with asyncio.timeout(DEADLINE):
            return await answer

    async def listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            waiting = self._waiting.pop(said.get("id", 0), None)
            if waiting is None:
                if page := self._pages.get(said.get("sessionId", "")):
                    page.heard(said["method"], said["params"])
            elif waiting.done():
                pass  # the task that asked has ended
            elif "error" in said:
                waiting.set_exception(AssertionError(said["error"]["message"]))
            else:
                waiting.set_result(said["result"])

    async def open(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        scale: float = 1,
        token: str = "",
        first: str = "",
        beside: Page | None = None,
    ) -> Page:
        """``scale``: pixels of the picture to one of the page. ``token``: as if it had been typed in.
        ``first``: JavaScript that runs before that of the page. ``beside``: in the same window and session as this one.
        """
        if beside:
            context = beside.context
        else:  # a session of its own: cookies, storage and cache
            context = (await self.tell("Target.createBrowserContext"))["browserContextId"]
            self._contexts.append(context)
        target = await self.tell("Target.createTarget", url="about:blank", browserContextId=context)
        session = (await self.tell("Target.attachToTarget", targetId=target["targetId"], flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.tell(f"{domain}.enable")
        await page.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await page.tell("Emulation.setEmulatedMedia", features=[scheme])
        if token:
            first += f";sessionStorage.setItem('keepstep-token', {json.dumps(token)})"
        await page.tell("Page.addScriptToEvaluateOnNewDocument", source=first)
        await page.load(url)
        return page

    async def close(self) -> None:
        """Close all pages that ``open`` opened."""
        for context in self._contexts:
            await self.tell("Target.disposeBrowserContext", browserContextId=context)


class Chromium:
    """A chromium process, with its profile in ``folder``. ``close`` ends it and all of its processes."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "chromium.log"
        home = os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}", "about:blank"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=home, start_new_session=True,
            )  # fmt: skip

        self.address = self._wait(folder / "DevToolsActivePort")
        """Where it takes orders."""

    def _wait(self, port_file: Path) -> str:
        deadline = time.monotonic() + DEADLINE
        while not port_file.exists() or port_file.read_text().count("\n") < 1:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)  # chromium writes the file and announces nothing
        port, path = port_file.read_text().splitlines()[:2]
        return f"ws://127.0.0.1:{port}{path}"

    def close(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(CLOSE_SECONDS)


RUNNING: list[Chromium] = []
"""The chromium of all tests of this pytest process."""


@contextlib.asynccontextmanager
async def chromium(_folder: Path) -> AsyncIterator[Browser]:
    """A connection to the running chromium; the windows that are opened through it are closed afterwards."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(RUNNING[0].address, max_msg_size=0) as socket,
    ):
        browser = Browser(socket)
        listening = asyncio.create_task(browser.listen())
        try:
            yield browser
        finally:
            with contextlib.suppress(Exception):
                await browser.close()
            listening.cancel()
            await asyncio.wait([listening])
