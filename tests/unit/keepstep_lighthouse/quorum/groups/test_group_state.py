"""The transition table of a group's state."""

from __future__ import annotations

import pytest

from keepstep_lighthouse.quorum.groups import group as module
from keepstep_lighthouse.quorum.groups.group import TRANSITIONS, Action, Group, IllegalTransitionError, State


def documented() -> dict[tuple[str, str], str]:
    """The table of the docstring: (state, action) -> next state."""
    lines = [line.split() for line in (module.__doc__ or "").splitlines()]
    head = next(line for line in lines if line[:1] == ["state"])
    rows = [line for line in lines if line and line[0] in State.__members__]
    return {(row[0], action): after for row in rows for action, after in zip(head[1:], row[1:], strict=True)}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("action", Action)
def test_the_docstring_shows_each_transition(state: State, action: Action) -> None:
    after = TRANSITIONS[state][action]
    assert documented()[state.name, action.name] == ("-" if after is None else after.name)


def test_the_docstring_shows_no_other_transition() -> None:
    assert len(documented()) == len(State) * len(Action)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("action", Action)
def test_a_transition_that_the_table_does_not_have_raises(state: State, action: Action) -> None:
    group = Group("a:1", "a", 1, member=True, session=1, state=state)
    after = TRANSITIONS[state][action]
    if after is None:
        with pytest.raises(IllegalTransitionError, match=f"a:1 is {state.name} and cannot {action.name}"):
            group.apply(action)
    else:
        group.apply(action)
    assert group.state is (state if after is None else after)
