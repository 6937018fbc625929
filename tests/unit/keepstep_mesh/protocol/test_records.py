"""Records from a maker are those that their class makes; a copier takes the fields of another record."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, dataclass, field

import pytest

from keepstep_mesh.protocol.records import copier, maker


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    lineage: int | str = "new"
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NamedStep(Step):
    name: str = ""


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


def test_a_made_record_of_a_class_with_a_base_has_the_fields_of_both_and_is_frozen() -> None:
    made = maker(NamedStep)(3, groups=("a",), name="night")
    assert made == NamedStep(3, "new", ("a",), "night")
    assert copier(Step, NamedStep)(made) == Step(3, groups=("a",))
    for change in (
        lambda: setattr(made, "number", 4),
        lambda: setattr(made, "name", ""),
        lambda: delattr(made, "name"),
    ):
        with pytest.raises(FrozenInstanceError):
            change()


@pytest.mark.parametrize("cls", [NoSlots, Checked, Collecting, int])
def test_other_classes_are_refused(cls: type) -> None:
    with pytest.raises(TypeError):
        maker(cls)


def test_a_copy_has_the_equal_fields_of_another_record_and_those_that_are_given() -> None:
    @dataclass(frozen=True, slots=True)
    class Asked:
        number: int
        lineage: int | str
        other: str = ""

    copy = copier(Step, Asked, "number")
    copied = copy(Asked(3, 7, "not of a step"), number=4)
    assert copied == Step(4, 7, ())
    with pytest.raises(FrozenInstanceError):
        copied.number = 5  # type: ignore[misc]


def test_a_copy_without_a_value_for_a_field_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="Collecting has no field 'number'"):
        copier(Step, Collecting)
