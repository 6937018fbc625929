"""Run one end of a transfer over raw sockets: the limit of this machine. Commands are those of ``transfer_ends.py``.

raw_ends.py raw source|joiner BYTES TENSORS ADDRESS NAME. Each stream is a thread with a connection of its own, which
receives an equal part of the bytes into allocated memory.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

PIECE_BYTES = 1 << 20
PART = struct.Struct("!QQ")
"""First byte, and the one after the last."""


def source(size, address):
    state = memoryview(bytearray(b"keepstep" * (size // 8)))
    server = socket.create_server((address, 0))

    def serve(connection):
        with connection:
            first, end = PART.unpack(connection.recv(PART.size, socket.MSG_WAITALL))
            connection.sendall(state[first:end])

    def accept():
        while True:
            threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    for _ in sys.stdin:
        answer = {"staged": time.monotonic(), "metadata": f"{address}:{server.getsockname()[1]}", "extra": 0}
        print(json.dumps(answer), flush=True)


def joiner(size):
    state = memoryview(bytearray(b"\1" * size))
    for line in sys.stdin:
        ask = json.loads(line)
        host, port = ask["from"].split(":")
        streams = ask["num_chunks"]

        def receive(stream, streams=streams, to=(host, int(port))):
            first, end = size * stream // streams, size * (stream + 1) // streams
            with socket.create_connection(to) as connection:
                connection.sendall(PART.pack(first, end))
                while first < end:
                    piece = state[first : min(first + PIECE_BYTES, end)]
                    first += connection.recv_into(piece, 0, socket.MSG_WAITALL)

        with ThreadPoolExecutor(streams) as pool:
            list(pool.map(receive, range(streams)))
        print(json.dumps({"ended": time.monotonic(), "peak": 0}), flush=True)


if __name__ == "__main__":
    _, role, size, _, address, _ = sys.argv[1:]
    if role == "source":
        source(int(size), address)
    else:
        joiner(int(size))
