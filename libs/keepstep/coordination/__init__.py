"""The quorum without a Manager, and without torch: servers in threads, and blocking clients of them.

Names and parameters are those of ``torchft.coordination``. A deadline that passes raises ``TimeoutError``; any other
failure raises ``RuntimeError`` with the reason. Clients retry a connection with backoff within ``connect_timeout``.
"""

from keepstep.coordination.lighthouse import LighthouseClient, LighthouseServer, Quorum, QuorumMember
from keepstep.coordination.manager_server import ManagerClient, ManagerServer, QuorumResult

__all__ = [
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "Quorum",
    "QuorumMember",
    "QuorumResult",
]
