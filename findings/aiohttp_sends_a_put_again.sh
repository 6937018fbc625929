#!/usr/bin/env bash
# Guess: a PUT whose connection closes before the answer raises ServerDisconnectedError, and the caller knows that the
#   outcome is open.
# Seen: the client sends a PUT or a DELETE a second time by itself, and returns the answer to that. A PUT with
#   `If-None-Match: *`, which creates an object only if none exists, has created it, and the caller reads 412: another
#   one was faster. A DELETE reads 404. A POST, and a PUT whose body is a generator, raise the error. The client does so
#   for the methods that HTTP calls idempotent, on new connections too, and without an argument that turns it off.
# Version: aiohttp 3.14.5, ClientSession.
# Why it matters: locks, leaders and manifests of checkpoints in object stores are made with conditional PUTs. The
#   writer that holds the lock believes that it lost, and all processes wait until the lock expires; a saved checkpoint
#   looks like that of another job. The first request is in no log of the client. Put a name of the writer into the
#   object, and read it after a 412.
source "$(dirname "$0")/environment"
packages aiohttp==3.14.5
program <<'PYTHON'
import asyncio

from aiohttp import ClientError, ClientSession, web
from finding import compare, show_versions

show_versions("aiohttp")


class Store:
    """Objects under paths. It writes or deletes, and closes the connection before its first such answer."""

    def __init__(self):
        self.objects, self.requests = {}, []

    async def change(self, request):
        self.requests.append(request.method)
        body = await request.read()
        if request.method == "DELETE":
            status = 404 if self.objects.pop(request.path, None) is None else 204
        elif request.headers.get("If-None-Match") == "*" and request.path in self.objects:
            status = 412
        else:
            self.objects[request.path], status = body, 201
        if len(self.requests) == 1:
            request.transport.close()
        return web.Response(status=status)


async def outcome(method, body=None, content=None):
    """Return the status or the error that the caller has, how many requests arrived, and the objects then."""
    store, app = Store(), web.Application()
    if content is not None:
        store.objects["/lock"] = content
    app.router.add_route("*", "/{name}", store.change)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        url = f"http://{host}:{port}/lock"
        async with ClientSession() as session:
            try:
                async with session.request(method, url, data=body, headers={"If-None-Match": "*"}) as answer:
                    seen = answer.status
            except ClientError as error:
                seen = type(error).__name__
    finally:
        await runner.cleanup()
    return [seen, len(store.requests), list(store.objects.values())]


async def parts():
    yield b"a"


lost = "ServerDisconnectedError"
for words, arguments, guess, known in (
    ("POST", ("POST", b"a"), [lost, 1, [b"a"]], [lost, 1, [b"a"]]),
    ("PUT", ("PUT", b"a"), [lost, 1, [b"a"]], [412, 2, [b"a"]]),
    ("PUT of a generator", ("PUT", parts()), [lost, 1, [b"a"]], [lost, 1, [b"a"]]),
    ("DELETE", ("DELETE", None, b"a"), [lost, 1, []], [404, 2, []]),
):
    compare(f"answer, requests, and objects; {words}", guess=guess, seen=asyncio.run(outcome(*arguments)), known=known)
PYTHON
