"""Invariants of keepstep_cli.running.supervisor under random events."""

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep_cli.running.supervisor import Supervisor
from keepstep_cli.running.supervisor_events import (
    Action,
    AskBan,
    AskJob,
    BanLearned,
    Begin,
    Event,
    GroupSpec,
    JobLearned,
    OrderRestart,
    RankExited,
    Restarts,
    SignalGroup,
    StartGroup,
    Stop,
    Tick,
)
from keepstep_mesh.net.backoff import Backoff


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_ranks_are_signalled_only_while_they_live_and_the_job_ends(data: st.DataObject) -> None:
    specs = [GroupSpec("lighthouse", service=True), GroupSpec("r0", 2), GroupSpec("r1", 1)]
    core = Supervisor(specs, Restarts(max_restarts=2, backoff=Backoff(1.0, 30.0), grace=5.0))
    alive: dict[str, set[int]] = {one.name: set() for one in specs}
    stopped = False

    def carry_out(actions: list[Action]) -> None:
        core.validate()
        for action in actions:
            if isinstance(action, StartGroup):
                assert not alive[action.group]
                assert not stopped
                alive[action.group] = set(range(next(one.ranks for one in specs if one.name == action.group)))
            elif isinstance(action, SignalGroup):
                assert alive[action.group]
            elif isinstance(action, AskBan | AskJob):
                assert not alive[action.group]
                assert not stopped
                questions.append(action)

    now = 0.0
    questions: list[AskBan | AskJob] = []
    carry_out(core.handle(Begin(), now))
    for _ in range(data.draw(st.integers(0, 40))):
        now += data.draw(st.floats(0.0, 3.0))
        living = [(name, rank) for name, ranks in alive.items() for rank in ranks]
        choice = data.draw(st.integers(0, 9))
        while questions:
            answer: Event
            match questions.pop():
                case AskBan(name):
                    answer = BanLearned(name, data.draw(st.sampled_from([None, 0.0, 2.0])))
                case AskJob(name):
                    answer = JobLearned(
                        name, data.draw(st.sampled_from([0, 100])), data.draw(st.sampled_from([None, 0, 7]))
                    )
            carry_out(core.handle(answer, now, 0.5))
        if choice < 6 and living:
            name, rank = data.draw(st.sampled_from(living))
            alive[name].remove(rank)
            carry_out(core.handle(RankExited(name, rank, data.draw(st.sampled_from([0, 1, 77, -9, -15]))), now, 0.5))
        elif choice == 9:
            stopped = True
            carry_out(core.handle(Stop(), now))
        elif choice == 8:
            carry_out(core.handle(OrderRestart(data.draw(st.sampled_from(sorted(alive)))), now))
        else:
            carry_out(core.handle(Tick(), now))
    stopped = True
    carry_out(core.handle(Stop(), now))
    for _ in range(20):
        for name, ranks in alive.items():
            for rank in sorted(ranks):
                ranks.remove(rank)
                carry_out(core.handle(RankExited(name, rank, -15), now, 0.5))
    assert core.exit_code() is not None
    assert core.deadline() is None
