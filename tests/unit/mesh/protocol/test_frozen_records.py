"""Records from a maker are those that their class makes."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, dataclass, field

import pytest

from keepstep_mesh.protocol.frozen_records import maker


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    lineage: int | str = "new"
    groups: tuple[str, ...] = ()


@dataclass
class NoSlots:
    number: int


@dataclass(slots=True)
class Checked:
    number: int

    def __post_init__(self) -> None: ...


@dataclass(slots=True)
class Collecting:
    numbers: list[int] = field(default_factory=list)


def test_a_made_record_is_one_of_its_class_with_its_defaults_and_frozen() -> None:
    make = maker(Step)
    made = make(3, groups=("a",))
    assert made == Step(3, groups=("a",))
    assert (type(made), hash(made), repr(made)) == (Step, hash(Step(3, groups=("a",))), repr(Step(3, groups=("a",))))
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(FrozenInstanceError):
        made.number = 4  # type: ignore[misc]
    with pytest.raises(TypeError, match="number"):
        make()  # type: ignore[call-arg]


@pytest.mark.parametrize("cls", [NoSlots, Checked, Collecting, int])
def test_other_classes_are_refused(cls: type) -> None:
    with pytest.raises(TypeError):
        maker(cls)
