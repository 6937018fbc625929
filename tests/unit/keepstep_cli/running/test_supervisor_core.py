"""The rules of keepstep_cli.running.supervisor, one by one."""

import signal
from dataclasses import replace

import pytest

from keepstep_cli.running.supervisor import Phase, Supervisor
from keepstep_cli.running.supervisor_events import (
    RESTARTED,
    Action,
    AskBan,
    AskJob,
    BanLearned,
    Begin,
    Event,
    GroupEnded,
    GroupSpec,
    JobLearned,
    Note,
    OrderRestart,
    RankExited,
    Restarts,
    SignalGroup,
    StartGroup,
    Stop,
    Tick,
)
from keepstep_mesh.exit_codes import (
    ENDS_THE_SAME,
    EXIT_EVICTED,
    EXIT_GROUP_FAILED,
    EXIT_PREFLIGHT,
    EXIT_SCRIPT_FAILS,
    describe_exit,
)
from keepstep_mesh.net.backoff import Backoff

RESTARTS = Restarts(max_restarts=3, backoff=Backoff(1.0, 8.0), ran_well=100.0, grace=10.0)
TERM, KILL = signal.SIGTERM, signal.SIGKILL


class Job:
    """A supervisor that is validated after every event. Its notes and the ends of its groups are left aside."""

    def __init__(self, *groups: GroupSpec, restarts: Restarts = RESTARTS) -> None:
        self.core = Supervisor(groups, restarts)
        self.notes: list[str] = []
        self.ends: list[GroupEnded] = []

    def __call__(self, event: Event, now: float, chance: float = 1.0) -> list[Action]:
        actions = self.core.handle(event, now, chance)
        self.core.validate()
        self.notes += [f"{one.group}: {one.sentence}" for one in actions if isinstance(one, Note)]
        self.ends += [one for one in actions if isinstance(one, GroupEnded)]
        return [one for one in actions if not isinstance(one, Note | GroupEnded)]


def job(*groups: GroupSpec, restarts: Restarts = RESTARTS) -> Job:
    made = Job(*groups, restarts=restarts)
    assert made(Begin(), 0.0) == [StartGroup(one.name, 0) for one in groups]
    return made


def test_an_end_is_told_with_the_ranks_in_their_order_and_why_the_group_was_ended() -> None:
    run = job(GroupSpec("r0", 2), GroupSpec("r1"), GroupSpec("lighthouse", service=True))
    run(RankExited("r0", 1, -KILL), 5.0)
    assert run.ends == [], "rank 0 runs"
    run(RankExited("r0", 0, EXIT_GROUP_FAILED), 6.0)
    assert run.ends == [GroupEnded("r0", ((1, -KILL), (0, EXIT_GROUP_FAILED)))]
    run(RankExited("lighthouse", 0, 1), 6.5)
    run(Tick(), 8.0)
    run(OrderRestart("r0"), 9.0)
    run(RankExited("r0", 0, 0), 9.5)
    run(RankExited("r0", 1, -TERM), 9.5)
    assert run.ends[1:] == [GroupEnded("r0", ((0, 0), (1, -TERM)), RESTARTED)]
    run(Stop(signal.SIGINT), 20.0)
    run(RankExited("r1", 0, 0), 20.0)
    assert run.ends[2:] == [GroupEnded("r1", ((0, 0),), "SIGINT")]


def test_the_end_of_a_group_that_finishes_is_not_told() -> None:
    run = job(GroupSpec("r0", 2))
    run(RankExited("r0", 0, 0), 5.0)
    run(RankExited("r0", 1, 0), 5.0)
    assert run.core.phase("r0") is Phase.FINISHED
    assert run.ends == []


def test_a_group_that_failed_before_the_stop_ended_by_itself() -> None:
    run = job(GroupSpec("r0", 2))
    run(RankExited("r0", 0, 1), 5.0)
    run(Stop(TERM), 5.5)
    run(RankExited("r0", 1, -TERM), 6.0)
    assert run.ends == [GroupEnded("r0", ((0, 1), (1, -TERM)))]


def test_an_ordered_restart_ends_a_group_that_runs_and_starts_it_without_a_pause() -> None:
    run = job(GroupSpec("r0", 2), GroupSpec("r1"))
    assert run(OrderRestart("r0"), 5.0) == [SignalGroup("r0", TERM)]
    assert run(RankExited("r0", 0, 0), 6.0) == []
    assert run(RankExited("r0", 1, -TERM), 6.5) == [StartGroup("r0", 1)]
    assert run(RankExited("r0", 0, 0), 7.0) == run(RankExited("r0", 1, 0), 7.0) == []
    assert run.core.phase("r0") is Phase.FINISHED, "the order holds once"


def test_an_ordered_restart_revives_a_group_in_any_phase_that_is_not_an_end_of_the_job() -> None:
    run = job(GroupSpec("finished"), GroupSpec("given up"), GroupSpec("waiting"), GroupSpec("asking"), GroupSpec("r"))
    run(RankExited("waiting", 0, 1), 1.0)
    run(RankExited("finished", 0, 0), 1.0)
    run(RankExited("given up", 0, 1, hopeless=True), 1.0)
    assert run(RankExited("asking", 0, 1), 1.0) == [AskJob("asking")]
    for name, count in (("finished", 1), ("given up", 1), ("waiting", 2), ("asking", 1)):
        assert run(OrderRestart(name), 2.0) == [StartGroup(name, count)]
    run(Stop(), 3.0)
    assert run(OrderRestart("finished"), 4.0) == []
    assert run.notes[-1] == "finished: not restarted: the job is ending"


def test_an_ordered_restart_is_allowed_beyond_the_limit() -> None:
    run = job(GroupSpec("r0"), GroupSpec("r1"), restarts=Restarts(max_restarts=0))
    run(RankExited("r0", 0, 1), 1.0)
    assert run.core.phase("r0") is Phase.GIVEN_UP
    assert run(OrderRestart("r0"), 2.0) == [StartGroup("r0", 0)]


def test_a_group_whose_ranks_all_exit_with_0_is_finished() -> None:
    run = job(GroupSpec("r0", 2))
    assert run(RankExited("r0", 1, 0), 5.0) == []
    assert run.core.phase("r0") is Phase.RUNNING
    assert run(RankExited("r0", 0, 0), 6.0) == []
    assert run.core.phase("r0") is Phase.FINISHED
    assert run.core.exit_code() == 0
    assert run.core.deadline() is None


def test_a_rank_that_dies_ends_its_group_and_no_other() -> None:
    run = job(GroupSpec("r0", 2), GroupSpec("r1", 2))
    assert run(RankExited("r0", 1, -9), 5.0) == [SignalGroup("r0", TERM)]
    assert run.core.phase("r0") is Phase.ENDING
    assert run.core.phase("r1") is Phase.RUNNING
    assert run.core.deadline() == 15.0
    assert run.notes == ["r0: rank 1 was killed by SIGKILL, ending the other 1"]


def test_the_group_starts_again_when_its_last_rank_is_gone_and_the_backoff_over() -> None:
    run = job(GroupSpec("r0", 2))
    run(RankExited("r0", 1, 1), 5.0)
    assert run(RankExited("r0", 0, -15), 6.0) == []
    assert run.core.deadline() == 7.0
    assert run(Tick(), 6.9) == []
    assert run(Tick(), 7.0) == [StartGroup("r0", 1)]
    assert run.core.exit_code() is None


def test_an_evicted_group_starts_again_when_its_ban_is_over() -> None:
    run = job(GroupSpec("r0", 2))
    run(RankExited("r0", 1, EXIT_EVICTED), 5.0)
    assert run(RankExited("r0", 0, 75), 6.0) == [AskBan("r0")]
    assert run(Tick(), 50.0) == [], "nothing before an answer"
    assert run(BanLearned("r0", 7.0), 50.0) == []
    assert (run.core.phase("r0"), run.core.deadline(), run.core.exit_code()) == (Phase.BANNED, 55.0, None)
    assert run(Tick(), 55.0) == [AskBan("r0")]
    run(BanLearned("r0", 2.0), 55.0)
    assert run.core.deadline() == 57.0
    assert run(Tick(), 57.0) == [AskBan("r0")]
    assert run(BanLearned("r0", 0.0), 57.0) == []
    assert run(Tick(), 58.0) == [StartGroup("r0", 1)]
    assert run.notes[1:] == [
        "r0: evicted, not started again: banned for 7 s more; `keepstep readmit r0` ends that",
        "r0: restart 1 of 3 in 1.00 s",
    ]
    assert run(RankExited("r0", 0, 1), 60.0) == [SignalGroup("r0", TERM)]
    run(RankExited("r0", 1, 1), 60.0)
    assert run.core.phase("r0") is Phase.WAITING, "that it was evicted once is forgotten"


def test_a_group_whose_machine_fails_its_checks_waits_twice_as_long_each_time_in_a_row() -> None:
    run = job(GroupSpec("r0", 2), restarts=Restarts(max_restarts=5, refused_pause=60.0, refused_most=200.0))
    now = 0.0

    def refused() -> float:
        run(RankExited("r0", 1, EXIT_PREFLIGHT), now)
        run(RankExited("r0", 0, -15), now)
        deadline = run.core.deadline()
        assert deadline is not None
        return deadline - now

    for pause in (60.0, 120.0, 200.0):
        assert refused() == pause
        now += pause
        assert run(Tick(), now)[0] == StartGroup("r0", run.core.restarts("r0"))
    assert "r0: refused by the checks of its machine, 3 in a row" in run.notes
    run(RankExited("r0", 1, 1), now)
    run(RankExited("r0", 0, -15), now)
    assert run.core.deadline() != now + 60, "another failure waits no longer than before"
    now += 100
    run(Tick(), now)
    assert refused() == 60.0, "a run that was not refused ends the row"
    now += 60
    run(Tick(), now)
    run(RankExited("r0", 1, EXIT_PREFLIGHT), now)
    run(RankExited("r0", 0, -15), now)
    assert run.core.exit_code() == EXIT_PREFLIGHT, "the last restart is used up"


def test_while_nobody_says_whether_a_group_is_banned_it_is_not_started() -> None:
    run = job(GroupSpec("r0"))
    assert run(RankExited("r0", 0, EXIT_EVICTED), 5.0) == [AskBan("r0")]
    for now in (5.0, 10.0, 15.0):
        assert run(BanLearned("r0", None), now) == []
        assert run(Tick(), now + 5) == [AskBan("r0")]
    assert run.notes[-1] == "r0: evicted, not started again: no lighthouse says whether it is banned; asking on"
    assert len(run.notes) == 2, "said once"


def test_a_ban_is_told_by_the_name_that_the_group_has_at_the_lighthouse() -> None:
    run = job(GroupSpec("r1"))
    run(RankExited("r1", 0, EXIT_EVICTED), 5.0)
    run(BanLearned("r1", 7.0, "train_ddp_1"), 5.0)
    assert run.notes[-1].endswith("`keepstep readmit train_ddp_1` ends that")


@pytest.mark.parametrize("code", sorted(ENDS_THE_SAME))
def test_a_group_that_would_end_the_same_is_given_up_at_once(code: int) -> None:
    run = job(GroupSpec("r0", 2), GroupSpec("r1"))
    run(RankExited("r0", 1, code), 5.0)
    assert run(RankExited("r0", 0, EXIT_GROUP_FAILED), 5.0) == []
    assert run.core.phase("r0") is Phase.GIVEN_UP
    assert run.notes[-1] == "r0: given up: another try would end the same"
    run(RankExited("r1", 0, code), 9.0)
    assert run.core.exit_code() == code, "a supervisor of `keepstep run` must not start it again either"


def test_of_several_groups_that_would_end_the_same_the_highest_code_is_the_jobs() -> None:
    run = job(GroupSpec("r0"), GroupSpec("r1"), GroupSpec("r2"))
    for group, code in (("r0", 65), ("r1", 79), ("r2", 0)):
        run(RankExited(group, 0, code), 5.0)
    assert run.core.exit_code() == 79


@pytest.mark.parametrize(("other", "expected"), [(0, 0), (80, 80)])
def test_a_group_that_comes_back_after_the_others_finished_makes_no_good_run_fail(other: int, expected: int) -> None:
    run = job(GroupSpec("r0"), GroupSpec("r1"), GroupSpec("r2"))
    for group, code in (("r0", 80), ("r1", other), ("r2", other)):
        run(RankExited(group, 0, code), 5.0)
    assert run.core.exit_code() == expected


def fail_twice(run: Job, code: int) -> None:
    for life, now in enumerate((5.0, 10.0), 1):
        assert run(RankExited("r0", 0, code), now) == []
        assert run(Tick(), now + 3.0) == [StartGroup("r0", life)]


@pytest.mark.parametrize("code", [1, 2])
def test_a_script_that_ends_with_an_error_three_times_before_the_first_step_is_given_up(code: int) -> None:
    run = job(GroupSpec("r0"))
    fail_twice(run, code)
    assert run(RankExited("r0", 0, code), 15.0) == [AskJob("r0")]
    assert run(JobLearned("r0", 0, 0), 15.1) == []
    assert "its script ended with an error 3 times in a row" in run.notes[-1]
    assert run.core.exit_code() == EXIT_SCRIPT_FAILS


@pytest.mark.parametrize("step", [None, 1])
def test_a_script_that_fails_in_a_job_with_steps_or_without_an_answer_restarts(step: int | None) -> None:
    run = job(GroupSpec("r0"))
    fail_twice(run, 1)
    run(RankExited("r0", 0, 1), 15.0)
    run(JobLearned("r0", 0, step), 15.1)
    assert run(Tick(), 30.0) == [StartGroup("r0", 3)]


def test_a_kill_between_two_errors_of_the_script_begins_the_count_again() -> None:
    run = job(GroupSpec("r0"), restarts=replace(RESTARTS, max_restarts=9))
    fail_twice(run, 1)
    run(RankExited("r0", 0, -9), 15.0)
    run(Tick(), 30.0)
    assert run(RankExited("r0", 0, 1), 35.0) == []
    assert run.core.phase("r0") is Phase.WAITING


def test_a_group_that_dies_after_another_finished_the_job_is_not_started_again() -> None:
    run = job(GroupSpec("r0"), GroupSpec("r1"))
    run(RankExited("r0", 0, 0), 5.0)
    assert run(RankExited("r1", 0, -9), 6.0) == [AskJob("r1")]
    assert run.core.exit_code() is None
    assert run(JobLearned("r1", 100), 6.1) == []
    assert run.notes[-1] == "r1: not started again: other groups finished the job at step 100"
    assert run.core.exit_code() == 1


def test_a_group_that_dies_after_another_was_drained_starts_again() -> None:
    run = job(GroupSpec("r0"), GroupSpec("r1"))
    run(RankExited("r0", 0, 0), 5.0)
    assert run(RankExited("r1", 0, -9), 6.0) == [AskJob("r1")]
    assert run(JobLearned("r1", 0), 6.0) == []
    assert run(Tick(), 7.0) == [StartGroup("r1", 1)]


def test_a_stop_ends_the_question_whether_the_job_is_finished() -> None:
    run = job(GroupSpec("r0"), GroupSpec("r1"))
    run(RankExited("r0", 0, 0), 5.0)
    run(RankExited("r1", 0, -9), 6.0)
    run(Stop(), 6.0)
    assert run(JobLearned("r1", 0), 6.1) == []
    assert run.core.exit_code() == 128 + TERM


def test_a_group_that_can_never_start_is_given_up_at_once_and_a_service_is_not() -> None:
    run = job(GroupSpec("r0"), GroupSpec("r1"), GroupSpec("lighthouse", service=True))
    assert run(RankExited("r0", 0, 127, hopeless=True), 5.0) == []
    assert run.core.phase("r0") is Phase.GIVEN_UP
    run(RankExited("lighthouse", 0, 127, hopeless=True), 5.0)
    assert run.core.phase("lighthouse") is Phase.WAITING
    run(RankExited("r1", 0, 0), 6.0)
    assert run.core.exit_code() == 127


def test_ctrl_c_is_answered_with_what_a_second_one_does() -> None:
    run = job(GroupSpec("r0"))
    run(Stop(signal.SIGINT), 5.0)
    assert run.notes == ["run: ending; Ctrl-C again kills at once"]


@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGPIPE), (signal.SIGPIPE, signal.SIGINT)])
def test_ctrl_c_that_also_ends_the_reader_of_the_output_is_one_stop(signals: tuple[signal.Signals, ...]) -> None:
    run = job(GroupSpec("r0"))
    assert run(Stop(signals[0]), 1.0) == [SignalGroup("r0", TERM)]
    assert run(Stop(signals[1]), 1.1) == []
    assert run(Stop(signal.SIGPIPE), 1.2) == []
    assert run(Stop(signal.SIGINT), 2.0) == [SignalGroup("r0", KILL)]
    run(RankExited("r0", 0, 0), 2.1)
    assert run.core.exit_code() == 128 + signal.SIGINT


def test_a_stop_ends_the_wait_for_a_ban() -> None:
    run = job(GroupSpec("r0"))
    run(RankExited("r0", 0, EXIT_EVICTED), 5.0)
    assert run(Stop(TERM), 6.0) == []
    assert run.core.exit_code() == 128 + TERM
    assert run(BanLearned("r0", 0.0), 7.0) == []


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    run = job(GroupSpec("r0", 2))
    run(RankExited("r0", 0, 1), 5.0)
    assert run(Tick(), 14.9) == []
    assert run(Tick(), 15.0) == [SignalGroup("r0", KILL)]
    assert run.core.deadline() is None
    run(RankExited("r0", 1, -9), 15.1)
    assert run.core.phase("r0") is Phase.WAITING


def test_a_rank_that_was_done_before_another_failed_is_started_again_with_it() -> None:
    run = job(GroupSpec("r0", 2))
    run(RankExited("r0", 0, 0), 5.0)
    assert run(RankExited("r0", 1, 1), 6.0) == []
    assert run(Tick(), 7.0) == [StartGroup("r0", 1)]


def test_the_exit_of_a_rank_that_was_told_to_end_does_not_count_twice() -> None:
    run = job(GroupSpec("r0", 3))
    run(RankExited("r0", 0, 1), 5.0)
    assert run(RankExited("r0", 1, 1), 5.1) == []
    assert run(RankExited("r0", 2, 1), 5.2) == []
    assert run.core.restarts("r0") == 1


@pytest.mark.parametrize(("chance", "first", "second", "third"), [(1.0, 1.0, 2.0, 4.0), (0.0, 0.5, 1.0, 2.0)])
def test_the_backoff_doubles_and_is_drawn_from_its_upper_half(
    chance: float, first: float, second: float, third: float
) -> None:
    run = job(GroupSpec("r0"))
    now = 0.0
    for backoff in (first, second, third):
        run(RankExited("r0", 0, -9), now, chance)
        assert run.core.deadline() == pytest.approx(now + backoff)
        now += backoff
        assert run(Tick(), now)


def test_the_backoff_has_a_limit() -> None:
    run = job(GroupSpec("r0"), restarts=Restarts(max_restarts=5000, backoff=Backoff(1.0, 8.0)))
    now = 0.0
    for _ in range(2000):
        run(RankExited("r0", 0, -9), now)
        deadline = run.core.deadline()
        assert deadline is not None
        assert deadline - now <= 8.0
        now = deadline
        run(Tick(), now)


def test_a_group_that_ran_well_starts_again_at_once_and_backs_off_anew_after_it() -> None:
    run = job(GroupSpec("r0"))
    run(RankExited("r0", 0, -9), 1.0)
    run(Tick(), 2.0)
    run(RankExited("r0", 0, -9), 3.0)
    run(Tick(), 5.0)
    run(RankExited("r0", 0, -9), 105.0)
    assert run.core.deadline() == 105.0
    assert run(Tick(), 105.0) == [StartGroup("r0", 3)]
    assert run.notes[-1] == "r0: restart 3 of 3 now"


def test_a_short_life_after_a_long_one_waits_for_the_first_backoff() -> None:
    run = job(GroupSpec("r0"))
    run(RankExited("r0", 0, -9), 1.0)
    run(Tick(), 2.0)
    run(RankExited("r0", 0, -9), 102.0)
    run(Tick(), 102.0)
    run(RankExited("r0", 0, -9), 103.0)
    assert run.core.deadline() == 104.0


def test_a_group_is_given_up_after_max_restarts_and_the_others_go_on() -> None:
    run = job(GroupSpec("r0"), GroupSpec("r1"))
    now = 0.0
    for restart in range(1, 4):
        run(RankExited("r0", 0, -9), now)
        now = run.core.deadline() or 0.0
        assert run(Tick(), now) == [StartGroup("r0", restart)]
    assert run(RankExited("r0", 0, -9), now) == []
    assert run.core.phase("r0") is Phase.GIVEN_UP
    assert run.notes[-1] == "r0: given up after 3 restarts"
    assert run.core.exit_code() is None
    run(RankExited("r1", 0, 0), now + 1)
    assert run.core.exit_code() == 1


def test_no_restart_is_possible() -> None:
    run = job(GroupSpec("r0"), restarts=Restarts(max_restarts=0))
    run(RankExited("r0", 0, 3), 1.0)
    assert run.core.exit_code() == 1
    assert run.notes == ["r0: rank 0 exited with 3", "r0: given up, no restarts allowed"]


def test_a_stop_ends_all_groups_and_its_signal_is_the_exit_code() -> None:
    run = job(GroupSpec("r0"), GroupSpec("r1"))
    assert run(Stop(signal.SIGINT), 5.0) == [SignalGroup("r0", TERM), SignalGroup("r1", TERM)]
    assert run(RankExited("r0", 0, 0), 6.0) == []
    assert run(RankExited("r1", 0, -15), 6.0) == []
    assert run.core.exit_code() == 130


def test_after_a_stop_a_group_is_killed_when_the_grace_is_over_and_never_restarted() -> None:
    run = job(GroupSpec("r0"))
    run(Stop(signal.SIGTERM), 5.0)
    assert run(Tick(), 15.0) == [SignalGroup("r0", KILL)]
    run(RankExited("r0", 0, -9), 15.1)
    assert run.core.exit_code() == 143


def test_a_group_that_waits_for_its_restart_does_not_start_after_a_stop() -> None:
    run = job(GroupSpec("r0"))
    run(RankExited("r0", 0, -9), 5.0)
    assert run(Stop(), 5.5) == []
    assert run.core.deadline() is None
    assert run.core.exit_code() == 143


def test_a_group_that_failed_before_the_stop_does_not_start_after_it() -> None:
    run = job(GroupSpec("r0", 2))
    run(RankExited("r0", 0, -9), 5.0)
    run(Stop(), 5.5)
    assert run(RankExited("r0", 1, -15), 6.0) == []
    assert run.core.phase("r0") is Phase.STOPPED


def test_a_second_stop_kills_at_once() -> None:
    run = job(GroupSpec("lighthouse", service=True), GroupSpec("r0", 2), GroupSpec("r1"))
    run(Stop(signal.SIGINT), 5.0)
    run(RankExited("r1", 0, 0), 5.1)
    assert run(Stop(signal.SIGINT), 5.2) == [SignalGroup("lighthouse", KILL), SignalGroup("r0", KILL)]
    assert run.core.deadline() is None


def test_a_service_is_restarted_without_limit_and_whatever_its_exit_code() -> None:
    run = job(GroupSpec("lighthouse", service=True), GroupSpec("r0"))
    now = 0.0
    for restart in range(1, 10):
        assert run(RankExited("lighthouse", 0, restart % 2), now) == []
        now = run.core.deadline() or 0.0
        assert run(Tick(), now) == [StartGroup("lighthouse", restart)]


def test_services_end_after_the_last_group() -> None:
    run = job(GroupSpec("lighthouse", service=True), GroupSpec("r0"))
    assert run(RankExited("r0", 0, 0), 5.0) == [SignalGroup("lighthouse", TERM)]
    assert run.core.exit_code() is None
    run(RankExited("lighthouse", 0, -15), 5.1)
    assert run.core.exit_code() == 0


def test_services_end_last_at_a_stop_too() -> None:
    run = job(GroupSpec("lighthouse", service=True), GroupSpec("r0"))
    assert run(Stop(), 5.0) == [SignalGroup("r0", TERM)]
    assert run(RankExited("r0", 0, 0), 6.0) == [SignalGroup("lighthouse", TERM)]
    run(RankExited("lighthouse", 0, 0), 6.1)
    assert run.core.exit_code() == 143


def test_two_groups_of_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="same name"):
        Supervisor([GroupSpec("r0"), GroupSpec("r0")], RESTARTS)


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exited with 0"), (7, "exited with 7"), (-9, "was killed by SIGKILL"), (-99, "signal 99")]
)
def test_exit_codes_are_told_in_words(code: int, words: str) -> None:
    assert words in describe_exit(code)
