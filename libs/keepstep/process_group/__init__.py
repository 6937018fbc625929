"""Process groups that can be aborted and configured again."""

from keepstep.process_group.baby.baby_group import (
    ProcessGroupBaby,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupBabyXCCL,
)
from keepstep.process_group.base import ProcessGroup
from keepstep.process_group.group_errors import ProcessGroupAbortedError, ProcessGroupError, ProcessGroupTimeoutError
from keepstep.process_group.reconfiguration import ReconfigureOptions
from keepstep.process_group.store_exchange import create_store_client, reconfigure_with_store
from keepstep.process_group.torch_backends.gloo import ProcessGroupGloo
from keepstep.process_group.torch_backends.nccl import ProcessGroupNCCL, ProcessGroupXCCL
from keepstep.process_group.wrappers import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroupDummy,
    ProcessGroupWrapper,
)

__all__ = [
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupAbortedError",
    "ProcessGroupBaby",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupDummy",
    "ProcessGroupError",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupTimeoutError",
    "ProcessGroupWrapper",
    "ProcessGroupXCCL",
    "ReconfigureOptions",
    "create_store_client",
    "reconfigure_with_store",
]
