import pytest
import torch

from keepstep.one_copy.copies.frames import CopyError
from keepstep.one_copy.copies.keeper import Keeper
from keepstep.one_copy.copies.kept_bytes import Memory, Stored
from keepstep.one_copy.core.holding import State

NAMES = [["a"], ["b"]]


def state(step: int) -> State:
    return State(step, step)


def keeper_of(room: int = 1 << 30) -> Keeper:
    return Keeper(torch.optim.SGD, lambda: torch.device("cpu"), lambda: room)


def begin(keeper: Keeper, quorum_id: int, *, fill: bool = True, whole: bool = False, need: int = 100) -> None:
    keeper.begin(1, 0, quorum_id, NAMES, need, whole=whole, fill=fill, boxes={})


def take(keeper: Keeper, quorum_id: int, part: str, step: int, content: object, number: int = 0) -> None:
    keeper.take(1, 0, quorum_id, part, state(step), number, Stored.of(content, Memory()))


def base(value: float) -> dict[str, object]:
    return {"parameter": torch.full((2,), value), "group": 0, "state": {}}


def end(keeper: Keeper, quorum_id: int, step: int, *, skipped: bool = False) -> None:
    options = [{"lr": 1.0, "momentum": 0.0}]
    take(keeper, quorum_id, "end", step, {"options": options, "buffers": {}, "random": {}, "skipped": skipped})


def fill(keeper: Keeper, quorum_id: int, step: int) -> None:
    for number, (name,) in enumerate(NAMES):
        take(keeper, quorum_id, "base", step, {name: base(10.0)}, number)
    end(keeper, quorum_id, step)


def step_to(keeper: Keeper, quorum_id: int, step: int, *, skipped: bool = False) -> None:
    for number, (name,) in enumerate(NAMES):
        take(keeper, quorum_id, "gradients", step, {} if skipped else {name: torch.ones(2)}, number)
    end(keeper, quorum_id, step, skipped=skipped)


def value(keeper: Keeper, step: int) -> float:
    found = keeper.rebuild(1, 0, state(step), 1)["b"]["parameter"]
    return float(found[0])


def test_a_copy_is_rebuilt_at_each_step_of_its_log_and_skipped_steps_change_nothing() -> None:
    keeper = keeper_of()
    begin(keeper, 1)
    fill(keeper, 1, 0)
    step_to(keeper, 1, 1)
    step_to(keeper, 1, 2, skipped=True)
    step_to(keeper, 1, 3)
    assert [value(keeper, step) for step in range(4)] == [10.0, 9.0, 9.0, 8.0]


def test_whole_states_replace_those_before_once_they_are_committed() -> None:
    keeper = keeper_of()
    begin(keeper, 1, whole=True)
    fill(keeper, 1, 0)
    for number, (name,) in enumerate(NAMES):
        take(keeper, 1, "gradients", 1, {name: base(3.0)}, number)
    end(keeper, 1, 1)
    assert (value(keeper, 0), value(keeper, 1)) == (10.0, 3.0)
    keeper.commit(1, 0, 1, state(1))
    assert [copy.states for copy in keeper.copies()] == [(state(1),)]
    assert value(keeper, 1) == 3.0


def test_an_owner_whose_place_another_process_has_changes_nothing() -> None:
    keeper = keeper_of()
    begin(keeper, 1)
    fill(keeper, 1, 0)
    step_to(keeper, 1, 1)
    begin(keeper, 2, fill=False)
    with pytest.raises(CopyError, match="another process has the place of rank 0"):
        take(keeper, 1, "gradients", 1, {"a": torch.ones(2)})
    with pytest.raises(CopyError, match="another process has the place of rank 0"):
        begin(keeper, 1)
    assert value(keeper, 1) == 9.0
    step_to(keeper, 2, 2)
    assert value(keeper, 2) == 8.0


def test_the_copy_before_stays_until_a_new_one_is_whole() -> None:
    keeper = keeper_of()
    begin(keeper, 1)
    fill(keeper, 1, 0)
    begin(keeper, 2)
    take(keeper, 2, "base", 5, {"a": base(1.0)})
    assert value(keeper, 0) == 10.0
    fill(keeper, 2, 5)
    assert [copy.states for copy in keeper.copies()] == [(state(5),)]
    keeper.forget(but=set())
    assert (keeper.copies(), keeper.nbytes) == ((), 0)


def test_copies_that_do_not_fit_are_refused() -> None:
    keeper = keeper_of(room=50)
    with pytest.raises(CopyError, match="do not fit into"):
        begin(keeper, 1)
    assert keeper.copies() == ()


def test_memory_of_a_log_is_bounded_while_bases_go_round() -> None:
    keeper, sizes = keeper_of(), []
    begin(keeper, 1)
    fill(keeper, 1, 0)
    for step in range(1, 21):
        take(keeper, 1, "base", step - 1, {NAMES[step % 2][0]: base(float(step))}, step % 2)
        step_to(keeper, 1, step)
        sizes.append(keeper.nbytes)
    assert max(sizes[4:]) == max(sizes[-4:])


def test_steps_are_repeated_on_the_device_that_the_parameters_have_then() -> None:
    """In a thread a type of device alone means number 0, which another rank of the machine uses."""
    device = torch.device("cpu")
    keeper = Keeper(torch.optim.SGD, lambda: device, lambda: 1 << 30)
    begin(keeper, 1)
    fill(keeper, 1, 0)
    step_to(keeper, 1, 1)
    device = torch.device("meta")
    assert keeper.rebuild(1, 0, state(1), 1)["b"]["parameter"].device == device
