"""torch's contract for process groups that change their members.

A process group gives a handle, a text that names it. A new membership is an ordered list of handles and a uuid on which
all members agree; the rank of a member is the index of its handle. torch has the contract since version 2.14, and the
process groups of keepstep offer it with every torch.
"""

from __future__ import annotations

import collections
import json
import uuid as uuids
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from torch._C import _distributed_c10d
from torch.distributed import TCPStore

from keepstep_mesh.net.addresses import in_url, outward_address
from keepstep_mesh.net.fork_safety import claim_opened, listening_socket, sockets_at

if TYPE_CHECKING or not hasattr(_distributed_c10d, "ReconfigureOptions"):

    @dataclass
    class ReconfigureOptions:
        """A new membership of a process group.

        Args:
            uuid: number of the membership, less than 2**63; never used before by any member.
            handles: handle of each member, in the order of their ranks.
            timeout: limit of the reconfiguration; None: that of the process group.
            hints: ignored.
        """

        uuid: int = 0
        handles: list[str] | set[str] = field(default_factory=list)
        timeout: timedelta | None = None
        hints: dict[str, str] = field(default_factory=dict)

else:
    ReconfigureOptions = _distributed_c10d.ReconfigureOptions


REMEMBERED = 1024
"""Number of uuids that a process group remembers, to refuse one that was used before."""


@dataclass(frozen=True)
class Rendezvous:
    """A membership, as ``ProcessGroup.configure`` takes it."""

    store_addr: str
    rank: int
    world_size: int


class Handle:
    """The handle of one process group, and the store behind it: the members meet in the store of the first handle."""

    def __init__(self) -> None:
        self._id = uuids.uuid4().hex
        self._store: TCPStore | None = None
        self._address = ""
        self._used: collections.deque[int] = collections.deque(maxlen=REMEMBERED)

    def text(self) -> str:
        """Return the handle. The first call starts the store."""
        if self._store is None:
            host = outward_address()
            listener = listening_socket(host, 0)
            port = listener.getsockname()[1]
            with claim_opened(partial(sockets_at, port)):
                self._store = TCPStore(
                    host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
                )
            self._address = f"{in_url(host)}:{port}"
        return json.dumps({"id": self._id, "store": self._address})

    def rendezvous(self, options: ReconfigureOptions) -> Rendezvous:
        """Return the membership of ``options``, and remember its uuid.

        Raises:
            TypeError: the handles have no order.
            ValueError: this handle is missing, another handle is invalid, or the uuid was used before.
        """
        handles = options.handles
        if not isinstance(handles, list):
            raise TypeError(f"invalid handles of type {type(handles).__name__}: expected a list, in order of the ranks")
        try:
            members = [json.loads(handle) for handle in handles]
            ids = [member["id"] for member in members]
            store = members[0]["store"] if members else ""
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"invalid reconfigure handle, not of a keepstep process group: {error}") from error
        if self._id not in ids:
            raise ValueError(f"the handle of this process group is not among the {len(ids)} handles")
        if options.uuid in self._used:
            raise ValueError(f"uuid {options.uuid} was used before; use a new uuid for each reconfiguration")
        self._used.append(options.uuid)
        return Rendezvous(f"{store}/keepstep/{options.uuid}", ids.index(self._id), len(ids))

    def close(self) -> None:
        """Free the store. The next ``text`` starts another one."""
        self._store = None
