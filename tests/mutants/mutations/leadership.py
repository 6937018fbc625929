"""Bugs in the election: ``keepstep_lighthouse.leadership``."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Seeds, Test, Trace

LIGHTHOUSE = "services/keepstep_lighthouse"

MUTATIONS = (
    Mutation(
        "a deposed leader renews its lease",
        f"{LIGHTHOUSE}/leadership/campaign.py",
        "                await self._store.keep_alive(self._lease)\n"
        "                self._heard(await self._store.get(LEADER_KEY))\n",
        "                await self._store.keep_alive(self._lease)\n",
        Trace("a_deposed_leader_that_hears_of_nothing_stops_before_its_lease_ends"),
    ),
    Mutation(
        "a leader ignores a write of unknown outcome",
        f"{LIGHTHOUSE}/leadership/term.py",
        "                unknown = unknown or isinstance(error, OutcomeUnknownError | TimeoutError)\n",
        "                if isinstance(error, OutcomeUnknownError):\n"
        "                    return\n"
        "                unknown = False\n",
        Trace("a_write_of_a_quorum_that_is_lost"),
    ),
    Mutation(
        "a write of unknown outcome is not read back",
        f"{LIGHTHOUSE}/leadership/term.py",
        "                unknown = unknown or isinstance(error, OutcomeUnknownError | TimeoutError)\n",
        "                unknown = False\n",
        Trace("a_write_of_a_quorum_that_is_done"),
    ),
    Mutation(
        "a takeover after the loss of the leader key has no fence",
        f"{LIGHTHOUSE}/leadership/campaign.py",
        "        fenced_until = time.monotonic() + fence\n",
        "        fenced_until = 0.0 if expected is None else time.monotonic() + fence\n",
        Trace("the_deposer_releases_the_key_and_a_third_takes_it"),
    ),
    Mutation(
        "a leader answers after its lease has expired in a pause",
        f"{LIGHTHOUSE}/leadership/term.py",
        "        return self._until is not None and time.monotonic() >= self._until()\n",
        "        return False\n",
        Trace("a_leader_that_slept_past_its_lease_says_nothing"),
    ),
    Mutation(
        "the fence ignores the longer lease of an earlier leader",
        f"{LIGHTHOUSE}/leadership/campaign.py",
        "                fence = max(self.core.lease, _seconds(longest))\n",
        "                fence = max(self.core.lease, 0.0 * _seconds(longest))\n",
        Trace("the_next_leader_has_a_shorter_lease"),
    ),
    Mutation(
        "a takeover does not raise the epoch",
        f"{LIGHTHOUSE}/leadership/campaign.py",
        "                epoch = parse_epoch(stored) + 1\n",
        "                epoch = max(1, parse_epoch(stored))\n",
        Trace("a_quorum_id_raised_for_a_failed_commit_outlives_the_leader"),
    ),
    Mutation(
        "a lease counts from the answer to its renewal",
        f"{LIGHTHOUSE}/leadership/campaign.py",
        "            self.core.renewed(sent)\n",
        "            self.core.renewed(time.monotonic())\n",
        Trace("a_renewal_counts_from_when_it_was_sent"),
    ),
    Mutation(
        "a lease has no margin for clock drift",
        f"{LIGHTHOUSE}/leadership/election.py",
        "0.9 * self.lease",
        "self.lease",
        Trace("a_slow_clock_is_within_the_margin_of_the_lease"),
    ),
    Mutation(
        "a leader ignores that another lighthouse holds the key",
        f"{LIGHTHOUSE}/leadership/election.py",
        "            if self.known and self.value != self.mine:\n",
        "            if self.value == b'never':\n",
        Trace("a_deposed_leader_that_hears_of_nothing_stops_before_its_lease_ends"),
    ),
    Mutation(
        "a leader whose lease cannot be renewed does not step down",
        f"{LIGHTHOUSE}/leadership/election.py",
        "            if now >= self.until:\n",
        "            if now >= self.until + 1000:\n",
        Trace("the_store_is_away_for_longer_than_a_lease"),
    ),
    Mutation(
        "a follower that never reached the leader takes over",
        f"{LIGHTHOUSE}/leadership/election.py",
        "        if self._linked == leader:\n            self._linked",
        "        if True:\n            self._linked",
        Test(
            "tests/unit/keepstep_lighthouse/leadership/test_election.py::"
            "test_a_leader_is_succeeded_when_an_established_link_to_it_breaks_and_not_otherwise"
        ),
    ),
    Mutation(
        "a lighthouse that waits for the release of its lease spins",
        f"{LIGHTHOUSE}/leadership/campaign.py",
        "self.core.deadline() if free else None",
        "self.core.deadline()",
        Trace("a_leader_whose_lease_is_being_given_back_does_not_spin"),
    ),
    Mutation(
        "the writes of a term do not compare the leader key",
        f"{LIGHTHOUSE}/leadership/term.py",
        '        mine = (Compare(EPOCH_KEY, b"%d" % self.epoch), *leader)\n',
        "        mine = (*leader[:0],)\n",
        Seeds(2, 0, 500),
    ),
)
