"""The live state: received through transports of keepstep and of torchft's contract, and compared."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from keepstep.checkpointing import CheckpointTransport, HTTPTransport, PGTransport, RelayTransport
from keepstep.state.errors import StateMismatch
from keepstep.step.live_state import LiveState
from keepstep_mesh.errors import KeepstepError

SECOND = timedelta(seconds=1)
RECEIVED = {"user": {"model": {"w": torch.ones(2)}}, "manager": {"step": 7}}


class WithoutBase:
    """Written for torchft, whose transports know no options."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        self.asked = (src_rank, metadata, step, timeout)
        return RECEIVED


class WithBase(WithoutBase, CheckpointTransport[Any]):
    def metadata(self) -> str:
        return ""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None: ...


def registered() -> tuple[LiveState, list[Any], list[Any]]:
    user: list[Any] = []
    manager: list[Any] = []
    state = LiveState(lambda: {"step": 0}, manager.append)
    state.register("model", user.append, lambda: {"w": torch.zeros(2)})
    return state, user, manager


@pytest.mark.parametrize("kind", [WithoutBase, WithBase])
def test_a_transport_written_for_torchft_is_called_with_its_own_parameters_only(kind: type[Any]) -> None:
    state, user, manager = registered()
    transport = kind()
    state.receive(transport, 3, "there", 7, SECOND, lambda *_: None, limit=2 * SECOND)
    assert transport.asked == (3, "there", 7, SECOND)
    assert user == [RECEIVED["user"]["model"]]
    assert manager == [{"step": 7}]


@pytest.mark.parametrize("kind", [HTTPTransport, PGTransport, RelayTransport])
def test_a_transport_of_keepstep_receives_into_the_state_of_the_group(kind: type[CheckpointTransport[Any]]) -> None:
    assert kind.accepts_into


def test_a_transport_that_accepts_into_is_given_the_state_and_the_limits() -> None:
    class InPlace(WithBase):
        accepts_into = True

        def recv_checkpoint(self, *_where: Any, **options: Any) -> Any:
            self.options = options
            return RECEIVED

    state, _, _ = registered()
    transport = InPlace()
    state.receive(transport, 3, "there", 7, SECOND, print, limit=2 * SECOND)
    assert transport.options.pop("into")["user"]["model"]["w"].equal(torch.zeros(2))
    assert transport.options == {"progress": print, "limit": 2 * SECOND}


def test_what_is_copied_from_the_state_is_complete_before_a_load_begins() -> None:
    class InPlace(WithBase):
        accepts_into = True

        def recv_checkpoint(self, *_where: Any, **_options: Any) -> Any:
            order.append("receive")
            return RECEIVED

    order: list[str] = []
    state, *_ = registered()
    state.register("other", lambda _: order.append("load"), dict)
    state.settle = lambda: order.append("settle")
    with pytest.raises(StateMismatch):
        state.receive(InPlace(), 3, "there", 7, SECOND, lambda *_: None)
    assert order[:2] == ["settle", "receive"]
    order.clear()
    state.load_user_state({"model": {}, "other": {}})
    assert order == ["settle", "load"]


def test_only_registered_parts_are_compared_and_another_key_is_named() -> None:
    state, *_ = registered()
    whole = state.root()
    state.register("own", lambda _: None, lambda: {"position": 3})
    assert state.root() != whole
    state.compared = frozenset({"model"})
    assert state.root() == whole
    state.compared = frozenset({"modle"})
    with pytest.raises(KeepstepError, match=r"compare_only\(\) has \['modle'\].*\['model', 'own'\]"):
        state.root()


@pytest.mark.parametrize(("dtype", "reads"), [(torch.float32, 1), (torch.bfloat16, 2)], ids=["as loaded", "cast"])
def test_a_state_is_read_once_after_a_load_and_again_where_torch_has_cast_it(dtype: torch.dtype, reads: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    groups = optimizer.state_dict()["param_groups"]
    loaded = {"state": {0: {"momentum_buffer": torch.rand(2)}}, "param_groups": groups}
    read: list[str] = []
    state = LiveState(dict, lambda _: None)

    def save(name: str, value: Any) -> Any:
        read.append(name)
        return value

    state.register("model", lambda _: None, lambda: save("model", {"w": 1}))
    state.register("optimizer", optimizer.load_state_dict, lambda: save("optimizer", optimizer.state_dict()))
    user = {"model": {"w": 1}, "optimizer": loaded}
    state.check_loaded(state.load_user_state(user))
    assert [read.count(name) for name in ("model", "optimizer")] == [1, reads]
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], loaded["state"][0]["momentum_buffer"])


def test_a_load_that_removes_keys_from_what_it_gets_has_restored_them(caplog: pytest.LogCaptureFixture) -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CyclicLR(sgd, 0.01, 0.1)
    state = LiveState(dict, lambda _: None)
    state.register("scheduler", scheduler.load_state_dict, scheduler.state_dict)
    user = {"scheduler": scheduler.state_dict()}
    loaded = state.load_user_state(user)
    assert user["scheduler"].keys() != loaded["scheduler"].keys(), "torch changes what it gets"
    state.check_loaded(loaded)
    assert "state not restored" not in caplog.text
    state.check_loaded(user)
    assert "state not restored" in caplog.text
