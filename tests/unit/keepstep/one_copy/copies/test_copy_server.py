import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from keepstep.one_copy.copies import copy_sender
from keepstep.one_copy.copies.copy_sender import CopySender, Membership
from keepstep.one_copy.copies.copy_server import CopyServer, RebuiltSlices
from keepstep.one_copy.copies.early_gradients import PARTS
from keepstep.one_copy.copies.frames import CopyError, Frames, connect
from keepstep.one_copy.copies.keeper import Keeper
from keepstep.one_copy.copies.rank_state import OtherModelError, RankState
from keepstep.one_copy.copies.shard_reader import ShardReader
from keepstep.one_copy.core.holding import State
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.threads.starting import ThreadPoolExecutor

SECONDS = 30.0
TOKEN = ClientToken.of("secret")
START = State(0, 0)


@pytest.fixture
def keeper() -> Keeper:
    return Keeper(torch.optim.SGD, lambda: torch.device("cpu"), lambda: 1 << 30)


@pytest.fixture
def server(keeper: Keeper) -> Iterator[CopyServer]:
    made = CopyServer("127.0.0.1", TOKEN, keeper, SECONDS)
    yield made
    made.close()


@pytest.fixture
def sender() -> Iterator[CopySender]:
    made = CopySender(TOKEN, SECONDS, lambda: "")
    yield made
    made.close()


def rank_state() -> RankState:
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 3)
    return RankState(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))


def end(state: RankState) -> dict[str, object]:
    return {"options": state.options(), "buffers": {}, "random": {}, "skipped": False}


def step(state: RankState, sender: CopySender, number: int) -> None:
    for one in state.parameters:
        one.grad = torch.full_like(one, float(number))
    sender.begin(State(number - 1, number - 1), lambda: end(state), State(number, number))
    sender.finish(State(number, number), end(state))
    state.optimizer.step()


def test_a_rank_reads_the_state_that_another_one_has_sent_bit_for_bit(server: CopyServer, sender: CopySender) -> None:
    state = rank_state()
    sender.connect(state, Membership(1, 0, 1), {"k": (server.address, True)}, whole=False)
    for number in range(1, 6):
        step(state, sender, number)
    reader = ShardReader(TOKEN, 1, State(5, 5), SECONDS, lambda: "")
    found, rest = reader.read(server.address, 0, copy=True)
    for name, one in zip(state.names, state.parameters, strict=True):
        assert torch.equal(found[name]["parameter"], one)
        assert torch.equal(found[name]["state"]["momentum_buffer"], state.optimizer.state[one]["momentum_buffer"])
    assert rest["end"]["options"][0]["lr"] == 0.5
    assert reader.boxes(server.address, 0, copy=True) == state.boxes
    part, _ = reader.read(server.address, 0, copy=True, cuts={"weight": [[1, 0], [2, 4]]})
    assert list(part) == ["weight"]
    assert torch.equal(part["weight"]["parameter"], state.parameters[0][1:3])
    with pytest.raises(CopyError, match="no copy of rank 0 of world 2"):
        ShardReader(TOKEN, 2, State(5, 5), SECONDS, lambda: "").read(server.address, 0, copy=True)


def test_a_copy_follows_the_work_that_the_training_has_queued(
    server: CopyServer, sender: CopySender, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def queued(device: torch.device) -> Callable[[], None]:
        seen.append((f"queued on {device}", threading.current_thread().name))
        return lambda: seen.append(("waited", threading.current_thread().name.partition("_")[0]))

    monkeypatch.setattr(copy_sender, "queued_work", queued)
    state, training = rank_state(), threading.current_thread().name
    sender.connect(state, Membership(1, 0, 1), {"k": (server.address, True)}, whole=False)
    step(state, sender, 1)
    assert set(seen) == {("queued on cpu", training), ("waited", "keepstep-copying")}
    assert seen[0] == ("queued on cpu", training)


def test_a_server_that_has_no_descriptor_left_accepts_later(server: CopyServer, keeper: Keeper) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    peer, fill = socket.socket(), []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (peer.fileno() + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                fill.append(os.dup(peer.fileno()))
        host, port = server.address.split(":")
        peer.connect((host, int(port)))
        frames = Frames(peer)
        frames.send({"kind": "hello", "authorization": TOKEN.peer_headers()["Authorization"]}, limit=SECONDS)
        frames.send({"kind": "none"}, limit=SECONDS)
        with pytest.raises(CopyError, match="no progress"):
            frames.receive(1.0)
    finally:
        for one in fill:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "unknown request" in frames.receive(SECONDS)["reason"]
    frames.close()


def test_an_optimizer_that_gets_parameters_after_build_is_refused_since_keepers_would_not_step_them() -> None:
    model = torch.nn.Linear(4, 3)
    state = RankState(model, torch.optim.SGD([model.weight], lr=0.5))
    assert len(state.options()) == 1
    state.optimizer.add_param_group({"params": [model.bias]})
    with pytest.raises(OtherModelError, match="has 2 parameters, and had 1 when build"):
        state.options()


def test_gradients_that_are_sent_in_the_backward_pass_count_as_they_are_at_the_end(
    server: CopyServer, sender: CopySender
) -> None:
    """The keeper compares what it has got with the digests at the end: clipping and more passes change gradients."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    state = RankState(model, torch.optim.SGD(model.parameters(), lr=0.5))
    sender.connect(state, Membership(1, 0, 1), {"k": (server.address, True)}, whole=False)
    early = []
    for number, change in enumerate(["", "", "clip", "", "", "second pass", "", "none"]):
        sender.begin(State(number, number), lambda: end(state), State(number + 1, number + 1))
        for _ in range(2 if change == "second pass" else 1):
            model(torch.randn(4, 8)).square().mean().backward()
        sender.filled()
        early.append(len(sender._sent))
        if change == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)
        elif change == "none":
            state.parameters[0].grad = None
        sender.finish(State(number + 1, number + 1), end(state))
        state.optimizer.step()
        state.optimizer.zero_grad()
        reader = ShardReader(TOKEN, 1, State(number + 1, number + 1), SECONDS, lambda: "")
        found, _ = reader.read(server.address, 0, copy=True)
        for name, one in zip(state.names, state.parameters, strict=True):
            assert torch.equal(found[name]["parameter"], one), (change, name)
    assert early[0] == 0, "no step before tells how often a gradient comes"
    assert all(early[index] for index in (1, 2, 4, 5))
    assert early[3] == 0, "the step before has changed them"


@pytest.mark.parametrize("layers", [2, 5, 12])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_copies_and_free_blocks_have_at_most_2_2_times_the_bytes_of_the_state(
    server: CopyServer, sender: CopySender, keeper: Keeper, layers: int, kind: type[torch.optim.Optimizer]
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(layers)))
    state = RankState(model, kind(model.parameters(), lr=1e-3))
    sender.connect(state, Membership(1, 0, 1), {"k": (server.address, True)}, whole=False)
    sizes = []
    for number in range(30):
        for one in state.parameters:
            one.grad = torch.full_like(one, 1.0)
        sender.begin(State(number, number), lambda: end(state), State(number + 1, number + 1))
        sender.filled()
        sender.finish(State(number + 1, number + 1), end(state))
        sizes.append(keeper.nbytes / state.nbytes)
        state.optimizer.step()
    # SGD has gradients of the size of its state: each step replaces all bases, one after the other
    most = 2 + 1 / layers if kind is torch.optim.SGD and layers < 5 else 2.2
    assert max(sizes) < most + 0.01
    assert sizes[-1] > 1.7


def test_a_step_without_all_bases_is_not_confirmed(server: CopyServer, sender: CopySender) -> None:
    state = rank_state()
    sender.connect(state, Membership(1, 0, 1), {"k": (server.address, True)}, whole=False)
    sender._fill, state.slices_per_step = False, 0.5
    with pytest.raises(CopyError, match="not whole"):
        step(state, sender, 1)


def test_the_process_in_the_place_of_a_lost_owner_sends_no_base_again(
    server: CopyServer, sender: CopySender, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = rank_state()
    sender.connect(state, Membership(1, 0, 1), {"k": (server.address, True)}, whole=False)
    for number in range(1, 4):
        step(state, sender, number)
    state.slices_per_step = 1
    sent: list[str] = []
    send = CopySender._send_state

    def counted(self: CopySender, part: str, *args: Any, **kwargs: Any) -> None:
        sent.append(part)
        send(self, part, *args, **kwargs)

    monkeypatch.setattr(CopySender, "_send_state", counted)
    sender.connect(state, Membership(1, 0, 2), {"k": (server.address, False)}, whole=False)
    step(state, sender, 4)
    assert sent.count("base") == 1 < len(state.slices)
    found, _ = ShardReader(TOKEN, 1, State(4, 4), SECONDS, lambda: "").read(server.address, 0, copy=True)
    assert torch.equal(found["weight"]["parameter"], state.parameters[0])
    state.slices = (tuple(range(len(state.parameters))),)  # cut otherwise
    sent.clear()
    sender.connect(state, Membership(1, 0, 3), {"k": (server.address, False)}, whole=False)
    step(state, sender, 5)
    assert sent.count("base") == 1, "the keeper has other slices, and gets all bases"
    found, _ = ShardReader(TOKEN, 1, State(5, 5), SECONDS, lambda: "").read(server.address, 0, copy=True)
    assert torch.equal(found["weight"]["parameter"], state.parameters[0])


def test_each_slice_is_rebuilt_once_for_ranks_that_read_it_together() -> None:
    rebuilt: list[int] = []

    def rebuild(number: int) -> dict[str, Any]:
        rebuilt.append(number)
        return {"number": number}

    with ThreadPoolExecutor(2) as pool:
        slices = RebuiltSlices(pool, rebuild, 9, 4)
        for number in range(9):
            first, second = slices(number), slices(number)
            assert first is second
            assert first["number"] == number
        assert sorted(rebuilt) == list(range(9))
        assert slices(0)["number"] == 0, "a rank that comes late gets it too"
        assert rebuilt.count(0) == 2
    with ThreadPoolExecutor(2) as pool:
        alone = RebuiltSlices(pool, rebuild, 9, 1)
        rebuilt.clear()
        assert [alone(number)["number"] for number in range(9)] == rebuilt == list(range(9)), "none ahead"


def test_a_slice_that_was_not_rebuilt_is_rebuilt_for_the_next_reader() -> None:
    """The error that a reader got has a reference to the slices, so that they are still there."""
    memory = [False, True]

    def rebuild(number: int) -> dict[str, Any]:
        if number == 1 and not memory.pop(0):
            raise MemoryError
        return {"number": number}

    with ThreadPoolExecutor(2) as pool:
        slices = RebuiltSlices(pool, rebuild, 3, 4)
        assert slices(0)["number"] == 0
        with pytest.raises(MemoryError):
            slices(1)
        assert [slices(number)["number"] for number in range(3)] == [0, 1, 2]


def test_nothing_of_a_step_that_failed_is_sent_after_the_end_of_its_connections(sender: CopySender) -> None:
    begun, go = threading.Event(), threading.Event()

    def fail() -> None:
        raise CopyError("a keeper is lost")

    def send() -> None:
        begun.set()
        go.wait(SECONDS)

    sender._submit(fail)
    sender._submit(send)
    with pytest.raises(CopyError, match="a keeper is lost"):
        sender.filled()
    assert begun.wait(SECONDS)
    threading.Timer(0.1, go.set).start()
    sender.disconnect()
    assert go.is_set(), "disconnect has waited for it"


def test_gradients_of_all_slices_go_out_in_few_calls(
    server: CopyServer, sender: CopySender, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(12)))
    state = RankState(model, torch.optim.AdamW(model.parameters(), foreach=False))
    assert len(state.slices) == 12
    sender.connect(state, Membership(1, 0, 1), {"k": (server.address, True)}, whole=False)
    calls = [0]
    send = Frames.send_bytes

    def counted(self: Frames, *args: Any) -> None:
        calls[0] += threading.current_thread().name.startswith("keepstep-copying")
        send(self, *args)

    monkeypatch.setattr(Frames, "send_bytes", counted)
    for number in range(8):
        calls[0] = 0
        sender.begin(State(number, number), lambda: end(state), State(number + 1, number + 1))
        model(torch.randn(4, 8)).square().mean().backward()
        sender.finish(State(number + 1, number + 1), end(state))
        state.optimizer.step()
        state.optimizer.zero_grad()
    bases = 2 * 3  # at most three in a step, each with its digests
    assert calls[0] <= bases + PARTS + len(["seal", "end", "digests of the end"])


def test_a_wrong_token_and_a_large_hello_are_refused(server: CopyServer) -> None:
    with pytest.raises(CopyError, match=r"wrong token|closed the connection"):
        ShardReader(ClientToken.of("other"), 1, START, SECONDS, lambda: "").read(server.address, 0, copy=True)
    link = connect(server.address, TOKEN, SECONDS)
    link.close()
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), SECONDS) as raw:
        raw.sendall((1 << 30).to_bytes(4))
        assert b"header too large" in raw.recv(1 << 16)


def test_a_keeper_that_goes_away_fails_the_step_and_one_that_refuses_leaves_the_rank_exposed(
    server: CopyServer, sender: CopySender, keeper: Keeper
) -> None:
    state = rank_state()
    keeper._limit = lambda: 10
    sender.connect(state, Membership(1, 0, 1), {"k": (server.address, True)}, whole=False)
    assert "do not fit into" in sender.exposed["k"]
    step(state, sender, 1)  # without a keeper
    keeper._limit = lambda: 1 << 30
    sender.connect(state, Membership(1, 0, 2), {"k": (server.address, True)}, whole=False)
    assert sender.exposed == {}
    step(state, sender, 2)
    server.end_copies_before(3)
    with pytest.raises(CopyError):
        step(state, sender, 3)


def test_a_wait_for_a_keeper_ends_when_the_quorum_does() -> None:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = CopySender(TOKEN, SECONDS, lambda: "m1 is lost" if ended.is_set() else "")
        try:
            threading.Timer(0.1, ended.set).start()
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(CopyError, match="m1 is lost"):
                sender.connect(rank_state(), Membership(1, 0, 1), {"k": (address, True)}, whole=False)
        finally:
            sender.close()


def test_a_rank_goes_on_without_copies_when_its_keeper_has_no_memory_and_has_them_again_when_it_has(
    keeper: Keeper, server: CopyServer, sender: CopySender, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = rank_state()
    sender.connect(state, Membership(1, 0, 1), {"k": (server.address, True)}, whole=False)
    step(state, sender, 1)

    def full(size: int) -> list[memoryview]:
        raise MemoryError(size)

    monkeypatch.setattr(keeper.memory, "take", full)
    step(state, sender, 2)
    assert list(sender.exposed) == ["k"]
    assert "no memory for" in sender.exposed["k"]
    assert keeper.has(1, 0, State(1, 1)), "step 2 is not known to be committed"
    step(state, sender, 3)
    monkeypatch.setattr(copy_sender, "KEEPER_AGAIN_SECONDS", 0.0)
    step(state, sender, 4)
    assert "no memory for" in sender.exposed["k"], "it was asked again in vain"
    monkeypatch.undo()
    monkeypatch.setattr(copy_sender, "KEEPER_AGAIN_SECONDS", 0.0)
    step(state, sender, 5)
    assert not sender.exposed
    found, _ = ShardReader(TOKEN, 1, State(5, 5), SECONDS, lambda: "").read(server.address, 0, copy=True)
    assert torch.equal(found["weight"]["parameter"], state.parameters[0])
