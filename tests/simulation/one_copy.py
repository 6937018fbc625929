"""Jobs with one copy that lose members at random moments, again and again: ``python -m tests.simulation.one_copy``.

Members die, freeze, come back as they were, and are replaced or not, in any moment of steps and recoveries, without
limit. Each plan is checked against all that the members have.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from random import Random

from keepstep.one_copy.core.recovery_plan import Kind, Recovery
from tests.support.models.one_copy_moments import Job, check_plan, start
from tests.support.models.symbolic_copies import Rank

MOST_MEMBERS = 6
LOSSES = 14
AWAY = 4
"""Number of lost members that may still come back."""


class Walk:
    """One job, by its seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.job = Job(self.random.choice((1, 2)), self.random.choice((1, 2, 3)))
        names = [f"m{one}" for one in range(self.random.randint(2, 5))]
        self.group = start(self.job, names, self.random.randint(0, 4))
        self.kinds: Counter[Kind] = Counter()
        self._quorum_id = self.group.world.formed
        self._away: list[Rank] = []
        self._spares = 0
        self._lost = 0
        """Members that were lost since all copies were complete."""
        self._filling = bool(self.group.fills)
        self._cut_off = False
        """Whether a frozen member has returned: a step that it alone has committed may be given up."""

    def run(self) -> None:
        """Lose members until shards are lost. AssertionError: a rule is broken."""
        for _ in range(LOSSES):
            for _ in range(self.random.choice((0, 0, 1, 2, 4))):
                self.group = self.job.after_step(self.group, committed=self.random.random() < 0.8)
                self._lost, self._filling = 0, False
            ranks = self.job.random_moment_of_step(self.group, self.random)
            while True:
                ranks = self._change(ranks)
                recovery = self._plan(ranks)
                if recovery.kind is Kind.LOST:
                    return
                self._filling = True
                if self.random.random() < 0.6:
                    break
                ranks = self.job.random_moment_of_recovery(ranks, recovery, self.random)
            self.group = self.job.after_recovery(ranks, recovery, self.group.turn)

    def _change(self, ranks: list[Rank]) -> list[Rank]:
        """Take members away, let frozen ones come back, and let spares in."""
        count = min(len(ranks) - 1, self.random.choice((0, 1, 1, 1, 2)))
        gone = set(self.random.sample(range(len(ranks)), count))
        back = [one for one in self._away if self.random.random() < 0.25]
        lost = [one for index, one in enumerate(ranks) if index in gone]
        self._away = [*(one for one in self._away if one not in back), *lost][-AWAY:]
        self._lost += count
        self._cut_off = self._cut_off or bool(back)
        left = [*(one for index, one in enumerate(ranks) if index not in gone), *back]
        for _ in range(min(self.random.choice((0, count, count, 1)), max(0, MOST_MEMBERS - len(left)))):
            left.append(Rank(f"s{self._spares:03}", domain=self.random.choice(("", "x", "y"))))
            self._spares += 1
        return sorted(left, key=lambda one: one.name)

    def _plan(self, ranks: list[Rank]) -> Recovery:
        self._quorum_id += 1
        recovery = self.job.plan(self._quorum_id, ranks)
        self.kinds[recovery.kind] += 1
        may_lose = self._cut_off or self._filling or self._lost > self.job.copies
        check_plan(self.job, ranks, recovery, may_lose=may_lose)
        return recovery


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds (default: 1000)")
    parser.add_argument("--from", type=int, default=0, dest="start", help="first seed (default: 0)")
    arguments = parser.parse_args()
    failed, kinds = 0, Counter[Kind]()
    for seed in range(arguments.start, arguments.start + arguments.seeds):
        walk = Walk(seed)
        try:
            walk.run()
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: {error}")
        kinds += walk.kinds
    counted = ", ".join(f"{count} {kind.value}" for kind, count in kinds.items())
    print(f"{arguments.seeds} seeds, {failed} failed; recoveries: {counted}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
