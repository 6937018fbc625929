"""Streams, kernels, and copies of one device, and process groups in a child process."""

from __future__ import annotations

import os
import signal
import statistics
import time
from datetime import timedelta

import torch

from keepstep import HTTPTransport
from keepstep.process_group import ProcessGroupBabyGloo, ProcessGroupBabyNCCL, ProcessGroupError
from keepstep.quantization.fused import fused_dequantize_from_fp8, fused_quantize_into_fp8
from keepstep.quantization.row_format import FP8, ROW
from keepstep.state.staging import StagingArea
from keepstep_mesh.errors import ForkError
from tests.gpu.check import Check, Result
from tests.gpu.rank import TIMEOUT, Rank, seconds_of

BUSY_SECONDS = 0.3
"""Time for which a stream is kept busy before its tensor has its value."""
STATE_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
COPIES = 5
STAGING_GOAL = 0.8
"""Part of the rate of a plain copy to pinned memory."""
NOTICED_SECONDS = 30.0


def follow_streams(rank: Rank) -> None:
    """Values of collectives whose input, and whose result, belong to different streams."""
    group = rank.process_group()
    rank.configure(group, 1)
    side = torch.cuda.Stream()
    early = rank.full(0)
    value = rank.full(0)
    rank.synchronize()
    with torch.cuda.stream(side):
        rank.occupy(BUSY_SECONDS)
        value.fill_(rank.index + 1)
        work = group.allreduce([value])
    early.copy_(value)  # this stream waits for no other one
    work.wait()
    late = value.clone()
    total = rank.ranks * (rank.ranks + 1) / 2
    assert group.errored() is None
    assert bool((late == total).all()), f"wait: {late[0].item()}, expected {total}"
    assert not bool((early == total).all()), "this check cannot see a wait that is left out"
    with torch.cuda.stream(side):
        rank.occupy(BUSY_SECONDS)
        value.fill_(1)
        future = group.allreduce([value]).get_future()
    (result,) = future.wait()
    late = result.clone()
    assert group.errored() is None
    assert bool((late == rank.ranks).all()), f"future: {late[0].item()}, expected {rank.ranks}"


def compare_kernels(rank: Rank) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, generator=generator) * 100 for size in (1, 255, 256, 257, 100_003)]
    on_device = [one.to(rank.device) for one in inputs]
    reference, buffer = fused_quantize_into_fp8(inputs, 2), fused_quantize_into_fp8(on_device, 2)
    assert torch.equal(reference, buffer.cpu()), "the quantized bytes differ from those of the CPU"
    fused_dequantize_from_fp8(inputs, reference, 2)
    fused_dequantize_from_fp8(on_device, buffer, 2)
    for expected, found in zip(inputs, on_device, strict=True):
        assert torch.equal(expected, found.cpu()), "the dequantized values differ from those of the CPU"
    piece = torch.zeros(FP8.piece_bytes(300), dtype=torch.uint8)
    FP8.encode(torch.randn(300, ROW, generator=generator), *FP8.parts(piece, 300))
    sums = [torch.empty(300, ROW, device=device) for device in ("cpu", rank.device)]
    for total in sums:
        FP8.total([FP8.parts(piece.to(total.device), 300)] * 3, total, 1 / 3)
    assert torch.equal(sums[0], sums[1].cpu()), "the sums differ from those of the CPU"


def lose_the_child(rank: Rank) -> Result:
    """A process group in a child process, which is killed."""
    group = ProcessGroupBabyNCCL(TIMEOUT) if rank.on_gpu else ProcessGroupBabyGloo(TIMEOUT)
    try:
        rank.configure(group, 1)
        tensor = rank.full(rank.index + 1)
        group.allreduce([tensor]).wait()
        rank.synchronize()
        assert tensor[0].item() == rank.ranks * (rank.ranks + 1) / 2
        rank.meet("works")
        assert group.child_pid is not None
        os.kill(group.child_pid, signal.SIGKILL)
        deadline = time.monotonic() + NOTICED_SECONDS
        while group.errored() is None and time.monotonic() < deadline:
            time.sleep(0.01)  # asking is all that a caller can do
        assert isinstance(group.errored(), ProcessGroupError), repr(group.errored())
        seconds = seconds_of(lambda: rank.configure(group, 2))
        tensor = rank.full(1)
        group.allreduce([tensor]).wait()
        rank.synchronize()
        assert tensor[0].item() == rank.ranks
    finally:
        group.shutdown()
    return {"new child, s": round(seconds, 3)}


def stage(rank: Rank) -> Result:
    state = {"weights": torch.ones(STATE_BYTES["cuda"], dtype=torch.uint8, device=rank.device)}
    plain = _plain_copy_seconds(rank, state["weights"])
    area = StagingArea(lambda _snapshot: None)
    rank.occupy(BUSY_SECONDS)
    state["weights"].fill_(7)  # the copy follows the work that is queued
    assert bytes(area.stage(0, state).pack).count(7) == STATE_BYTES["cuda"], "the snapshot has older values"
    staged = statistics.median(seconds_of(lambda step=step: area.stage(step, state)) for step in range(COPIES))  # type: ignore[misc]
    size = STATE_BYTES["cuda"] / 1e9
    assert plain / staged > STAGING_GOAL / 2, f"staging has {plain / staged:.2f} of the rate of a plain copy"
    return {
        "staging, GB/s": round(size / staged, 2),
        "plain copy, GB/s": round(size / plain, 2),
        "ratio": round(plain / staged, 2),
        "goal": STAGING_GOAL,
    }


def _plain_copy_seconds(rank: Rank, source: torch.Tensor) -> float:
    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)

    def copy() -> None:
        pinned.copy_(source)
        rank.synchronize()

    copy()
    return statistics.median(seconds_of(copy) for _ in range(COPIES))


def heal(rank: Rank) -> Result | None:
    size = STATE_BYTES[rank.device.type]
    transport: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(timedelta(seconds=60), 0, "127.0.0.1")
    try:
        if rank.index == 0:
            state = {"weights": torch.arange(size // 8, dtype=torch.int64, device=rank.device)}
            rank.tell("metadata", transport.metadata())
            transport.send_checkpoint([1], 1, state, timedelta(seconds=60))
            rank.await_told("healed")
            return None
        target = {"weights": torch.zeros(size // 8, dtype=torch.int64, device=rank.device)}
        metadata = rank.await_told("metadata")
        began = time.monotonic()
        found = transport.recv_checkpoint(0, metadata, 1, timedelta(seconds=60), into=target)
        rank.synchronize()
        seconds = time.monotonic() - began
        rank.tell("healed")
        expected = torch.arange(size // 8, dtype=torch.int64, device=rank.device)
        assert torch.equal(found["weights"], expected), "the healed state differs"
        return {"heal, GB/s": round(size / 1e9 / seconds, 2)}
    finally:
        transport.shutdown()


def fork_a_worker(rank: Rank) -> None:
    """A forked child, such as a DataLoader worker, uses and frees the process group of its parent."""
    group = rank.process_group()
    rank.configure(group, 1)
    group.allreduce([rank.full(1)]).wait()
    child = os.fork()
    if not child:
        refused = isinstance(group.errored(), ForkError)
        group.shutdown()
        os._exit(0 if refused else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with status {status}"
    tensor = rank.full(1)
    group.allreduce([tensor]).wait()
    assert group.errored() is None
    assert tensor[0].item() == rank.ranks


CHECKS = (
    Check(
        "streams",
        "Collectives follow the streams of their tensors; the check fails when a wait is left out.",
        follow_streams,
        needs_gpu="a CPU has no streams",
    ),
    Check(
        "quantized",
        "The Triton kernels give the bytes of the reference on the CPU.",
        compare_kernels,
        ranks=1,
        seconds=120.0,
        needs_gpu="the kernels run on a GPU only",
    ),
    Check("baby", "A process group in a child process outlives the death of the child.", lose_the_child, seconds=120.0),
    Check(
        "staging",
        "A snapshot of CUDA tensors follows their stream; rate of its copy to the host.",
        stage,
        ranks=1,
        needs_gpu="a state in host memory is not copied through pinned buffers",
    ),
    Check("fork", "A forked child does not disturb the process group of its parent.", fork_a_worker),
    Check("heal", "Rate at which a state moves from one group to another.", heal, seconds=120.0),
)
