"""The scripts of docs/recipes.md train, also when a group is killed; the page shows their own lines."""

from __future__ import annotations

import json
import re
import signal
import textwrap
from pathlib import Path

import pytest

from tests.support.jobs.job import Group, Job

pytestmark = [pytest.mark.training, pytest.mark.timeout(200)]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SHORT = ["accumulation", "autocast_ema", "early_stop"]


def paths(*names: str) -> str:
    return ":".join(str(EXAMPLES / f"{name}.py") for name in names)


def finished(group: Group) -> dict[str, dict[str, object]]:
    return {event["script"]: event for event in group.lines if event["event"] == "finished"}


def warnings(*groups: Group) -> list[str]:
    """Lines in which the Manager warns of a mistake in the script."""
    page = (EXAMPLES.parent / "docs" / "footguns.md").read_text()
    table = page.partition("### Warnings of the Manager")[2].partition("\n## ")[0]
    texts = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(texts) >= 5
    return [line for group in groups for line in group.output if any(text in line for text in texts)]


def printed(group: Group, pattern: str) -> list[re.Match[str]]:
    return [match for line in group.output if (match := re.match(pattern, line))]


async def test_groups_end_every_recipe_at_the_same_step_with_the_same_weights() -> None:
    async with Job("--initial-replicas", "2") as job:
        groups = [
            await job.start(name, SCRIPTS=paths(*SHORT), REPLICA_GROUP_ID=str(number), NUM_REPLICA_GROUPS="2")
            for number, name in enumerate("ab")
        ]
        assert [await group.exit_codes() for group in groups] == [[0], [0]], job.report()
        a, b = map(finished, groups)
        assert list(a) == list(b) == SHORT
        for name in SHORT:
            assert (a[name]["step"], a[name]["digest"]) == (b[name]["step"], b[name]["digest"]), name
        assert a["accumulation"]["step"] == a["autocast_ema"]["step"] == 60
        assert a["early_stop"]["step"] < 2000, "it stopped before its last step"
        reports = [match for group in groups for match in printed(group, "stopped after step (\\d+), best loss")]
        assert [int(match[1]) for match in reports] == [a["early_stop"]["step"]], "one group reports"
        accuracies = [float(m[1]) for group in groups for m in printed(group, "step 60 accuracy of .* (\\S+)$")]
        assert len(accuracies) == 2
        assert min(accuracies) > 0.8
        assert not warnings(*groups)


async def test_after_a_kill_and_after_sigterm_every_batch_is_trained_on_once(tmp_path: Path) -> None:
    variables = {"SCRIPTS": paths("checkpoints"), "CHECKPOINTS": str(tmp_path / "saved"), "NUM_REPLICA_GROUPS": "2"}
    async with Job("--initial-replicas", "2") as job:
        a = await job.start("0", **variables, STEPS="1000000000")
        b = await job.start("1", **variables, STEPS="1000000000")
        await job.until(lambda: printed(a, "step ") and printed(b, "step "), "both train")
        b.kill()
        await b.exit_codes()
        before = len(printed(b, "step "))
        await job.start("1", **variables, STEPS="1000000000")
        await job.until(lambda: len(printed(b, "step ")) >= before + 100, "the killed group trains again")
        a.kill(number=signal.SIGTERM)
        b.kill(number=signal.SIGTERM)
        assert [await group.exit_codes() for group in (a, b)] == [[0], [0]], job.report()
        steps = [event["step"] for group in (a, b) for event in group.lines if event["event"] == "finished"]
        saved = sorted((tmp_path / "saved").iterdir())
        assert saved[-1].name == f"step-{max(steps):09}.pt", "saved at the SIGTERM"
        assert saved[0].name.endswith("00.pt"), "and by one group in between"
        assert len(saved) <= 3 + len(steps), "old files are removed"
        assert not [path for path in saved if path.suffix != ".pt"]

        # all groups resume at that step, and none of them alone
        await job.order("PATCH", "", min_replicas=2)
        for group in (a, b):
            await job.start(group.name, **variables, STEPS=str(max(steps) + 20))
        assert [await group.exit_codes() for group in (a, b)] == [[0], [0]], job.report()
        assert [int(printed(group, "resumed at step (\\d+)")[-1][1]) for group in (a, b)] == [max(steps)] * 2
        ends = [finished(group)["checkpoints"] for group in (a, b)]
        assert ends[0]["digest"] == ends[1]["digest"]
        drawn = [[int(m[1]) for m in printed(group, "step \\d+ batch (\\d+)")] for group in (a, b)]
        del drawn[1][before - 1]  # the others may have discarded the last step of the group that was killed in it
        batches = [*drawn[0], *drawn[1]]
        assert len(set(batches)) == len(batches), "a batch was trained on twice"
        missing = max(batches) + 1 - len(batches)
        assert missing <= 2, "the line above, and one between whose commit and line the group was killed"


async def test_a_sharded_group_heals_after_one_of_its_ranks_was_killed() -> None:
    async with Job("--initial-replicas", "2", "--verify-every", "5") as job:
        variables = {"SCRIPTS": paths("fsdp2"), "STEPS": "1000000000"}
        a = await job.start("0", ranks=2, **variables)
        b = await job.start("1", ranks=2, **variables)
        together = r"step (\d+) groups 2"
        await job.until(lambda: printed(a, together), "both train")
        b.kill(rank=1)
        other, killed = await b.exit_codes()
        assert killed == -signal.SIGKILL
        assert other in (1, 75), job.report()  # torch's collective failed, or keepstep noticed the death first
        seen = len(printed(a, together))
        await job.start("1", ranks=2, **variables)
        await job.until(lambda: len(printed(a, together)) >= seen + 3, "it takes part again")
        a.kill(number=signal.SIGTERM)
        b.kill(number=signal.SIGTERM)
        assert [await group.exit_codes() for group in (a, b)] == [[0, 0], [0, 0]], job.report()
        events = [json.loads(line) for line in (job.logs / "events.jsonl").read_text().splitlines()]
        verified = [event["detail"]["step"] for event in events if event["kind"] == "replicas_verified"]
        assert max(verified) > int(printed(a, together)[seen][1]), "weights and optimizers of the shards are equal"
        assert not [event for event in events if event["kind"] == "replicas_differ"]
        assert not warnings(a, b)


def test_the_pages_show_lines_of_the_scripts() -> None:
    pages = [
        (EXAMPLES.parent / "docs" / name).read_text() for name in ("recipes.md", "hsdp.md", "epochs.md", "one-copy.md")
    ]
    shown = set()
    for section in [section for page in pages for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]]:
        scripts = set(re.findall(r"\]\(\.\./examples/(\w+\.py)\)", section))
        if re.search(r"^\[A test\]\(\.\./tests/training/", section, flags=re.MULTILINE):
            assert not scripts
            continue  # its script is in the test
        for block in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
            (script,) = scripts
            shown.add(script)
            assert block.strip() in passages(EXAMPLES / script, block.count("\n")), f"not in {script}:\n{block}"
    others = {"durable.py", "parameter_server.py", *(path.name for path in EXAMPLES.glob("train_*.py"))}
    assert shown | others >= {path.name for path in EXAMPLES.glob("*.py")}


def passages(script: Path, length: int) -> set[str]:
    """Every ``length`` lines of a script, without their common indentation."""
    lines = script.read_text().splitlines()
    return {textwrap.dedent("\n".join(lines[start : start + length])).strip() for start in range(len(lines))}
