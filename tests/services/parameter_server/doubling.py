"""A parameter server that doubles numbers, and a client of it in a process: ``python doubling.py ADDRESS``.

The client prints each answer as a line, and asks again for each line of its standard input.
"""

from __future__ import annotations

import queue
import sys
from datetime import timedelta

import torch

from keepstep.parameter_server import ParameterServer
from keepstep.process_group import ProcessGroup, ProcessGroupGloo

SERVER, CLIENT, TAG = 0, 1, 0


class Doubling(ParameterServer):
    """Doubles what its clients send, until they send 0. ``ended``: what became of each session."""

    timeout = timedelta(seconds=60)

    def __init__(self, port: int = 0, **settings: object) -> None:
        self.ended: queue.Queue[tuple[str, str]] = queue.Queue()
        super().__init__(port, **{"hostname": "127.0.0.1", **settings})  # type: ignore[arg-type]

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(cls.timeout)

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        try:
            while value := receive(pg, CLIENT):
                send(pg, CLIENT, 2 * value)
        except Exception as error:
            self.ended.put((session_id, f"{type(error).__name__}: {error}"))
            raise
        self.ended.put((session_id, ""))


def send(pg: ProcessGroup, to: int, value: float) -> None:
    pg.send([torch.tensor([float(value)])], to, TAG).wait()


def receive(pg: ProcessGroup, source: int) -> float:
    tensor = torch.zeros(1)
    pg.recv([tensor], source, TAG).wait()
    return tensor.item()


def doubled(pg: ProcessGroup, value: float) -> float:
    """Ask the server."""
    send(pg, SERVER, value)
    return receive(pg, SERVER)


def main() -> None:
    torch.set_num_threads(1)
    pg = Doubling.new_session(sys.argv[1])
    print(doubled(pg, 1), flush=True)
    for _ in sys.stdin:
        print(doubled(pg, 1), flush=True)
    pg.shutdown()


if __name__ == "__main__":
    main()
