"""The comparison of `keepstep demo --resume`: only a job that resumed, and lost no bit, has succeeded."""

from __future__ import annotations

from keepstep_cli.demo.resume_story import Run, summary


def told(steps: range, *, resumed: int | None = None, loss_of_4: str = "0.25", weights: str = "abc") -> Run:
    run = Run()
    add(run, steps, loss_of_4=loss_of_4)
    for group in ("r0", "r1"):
        if resumed is not None:
            run.heard(group, f"resumed at step {resumed}")
        run.heard(group, f"step {steps[-1]} weights {weights}")
    return run


def add(run: Run, steps: range, loss_of_4: str = "0.25") -> None:
    for step in steps:
        for place, group in enumerate(("r0", "r1")):
            loss = loss_of_4 if step == 4 else f"0.{step}"
            run.heard(group, f"step {step} batch {2 * step + place} loss {loss}")


def test_equal_losses_and_weights_after_a_resume_are_a_success() -> None:
    killed = told(range(1, 7), resumed=3)
    found = summary(told(range(1, 7)), killed, groups=2, killed_at=5)
    assert found["succeeded"]
    assert (found["resumed_at_step"], found["steps_lost"], found["losses_compared"]) == (3, 2, 12)


def test_another_loss_other_weights_or_no_resume_is_a_failure() -> None:
    undisturbed = told(range(1, 7))
    other_loss = summary(undisturbed, told(range(1, 7), resumed=3, loss_of_4="0.26"), groups=2, killed_at=5)
    assert (other_loss["succeeded"], other_loss["steps_with_other_losses"]) == (False, [4])
    assert not summary(undisturbed, told(range(1, 7), resumed=3, weights="abd"), groups=2, killed_at=5)["succeeded"]
    assert not summary(undisturbed, told(range(1, 7)), groups=2, killed_at=5)["succeeded"]
    assert not summary(undisturbed, told(range(1, 6), resumed=3), groups=2, killed_at=5)["succeeded"]
    repeated = told(range(1, 4), resumed=3)
    add(repeated, range(4, 5), loss_of_4="0.26")
    add(repeated, range(4, 7))
    assert summary(undisturbed, repeated, groups=2, killed_at=5)["steps_with_other_losses"] == [4]


def test_the_kill_comes_when_all_groups_have_the_step() -> None:
    run = Run()
    run.heard("r0", "step 3 batch 6 loss 0.1")
    assert not run.reached(2, 3)
    run.heard("r1", "step 3 batch 7 loss 0.1")
    assert run.reached(2, 3)
    assert not run.reached(2, 4)
