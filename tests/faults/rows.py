"""The table of the fault runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.faults import group_rows as groups
from tests.faults import lighthouse_rows as lighthouses
from tests.faults import probation_rows as probation
from tests.faults import spare_rows as spares
from tests.faults.outcome import Limit, Outcome
from tests.faults.row import HEARTBEAT_TIMEOUT, Row, Run
from tests.support.network import namespaces

P95_1_S = Limit("p95", 1.0)
KEEP_PACE = "failed steps take at most 10 % of 60 s of the others; all are equal later"
SILENCE = Limit("worst", HEARTBEAT_TIMEOUT + 0.5)

ROWS = {
    row.name: row
    for row in (
        Row(
            *("leader_killed", "the leader: SIGKILL", 50, lighthouses.leader_killed, P95_1_S),
            holds="a new epoch each time, a new quorum_id with each change of members",
        ),
        Row(
            *("leader_stopped", "the leader: SIGTERM", 20, lighthouses.leader_stopped, P95_1_S),
            holds="it exits 0, no step is discarded",
        ),
        Row(
            *("leader_frozen", "the leader: SIGSTOP for 30 s", 3, lighthouses.leader_frozen),
            holds="another leads; when it goes on, epoch, quorum_id and leader stay",
        ),
        Row(
            *("leader_without_etcd", "the leader cut off from etcd", 3, lighthouses.leader_without("etcd")),
            holds="another leads",
            cuts_network=True,
        ),
        Row(
            *(
                "leader_without_standby",
                "the leader cut off from the standby",
                3,
                lighthouses.leader_without("lighthouses"),
            ),
            holds="one leads",
            cuts_network=True,
        ),
        Row(
            *(
                "leader_without_workers",
                "the leader cut off from all workers",
                3,
                lighthouses.leader_without("workers"),
            ),
            holds="another leads",
            cuts_network=True,
        ),
        Row(
            *(
                "lighthouses_killed",
                "both lighthouses: SIGKILL, and started again",
                5,
                lighthouses.lighthouses_killed,
            ),
            holds="it goes on by itself",
        ),
        Row(
            *("etcd_node_killed", "1 of 3 etcd nodes and a group: SIGKILL", 5, lighthouses.etcd_node_killed),
            holds="the change of members is written",
        ),
        Row(
            "etcd_majority_killed",
            "2 of 3 etcd nodes: SIGKILL until all stands still; from the start of one on",
            *(3, lighthouses.etcd_majority_killed),
            holds="it goes on by itself",
        ),
        Row(
            *(
                "group_and_leader_killed",
                "1 of 3 groups and the leader: SIGKILL",
                5,
                groups.group_and_leader_killed,
            ),
            holds="it goes on without the group",
        ),
        Row(
            *("group_killed", "1 of 3 groups: SIGKILL", 40, groups.group_killed, Limit("p95", 0.1)),
            holds="it comes back equal",
        ),
        Row(
            "group_killed_with_retries",
            "1 of 3 groups: SIGKILL at any moment of a step, with retry_allreduce",
            *(50, groups.group_killed_with_retries),
            holds="the others discard no step; it comes back equal",
        ),
        Row(
            "samples_taken_once",
            "1 of 3 groups with an ElasticLoader: SIGKILL at any moment of a step, and started again",
            *(20, groups.samples_taken_once),
            holds="each sample of an epoch is in exactly one committed step",
        ),
        Row(
            "group_killed_with_a_spare",
            "1 of 3 groups with a spare: SIGKILL; to the first commit of three groups",
            *(20, spares.group_killed_with_a_spare, P95_1_S),
            holds="a spare takes the place of each",
        ),
        Row(
            *("group_replaced", "1 of 3 groups with a spare: `keepstep replace`", 20, spares.group_replaced, P95_1_S),
            holds="no step is discarded, and three groups take part in each",
        ),
        Row(
            "sessions_closed",
            "the connections of 3 living groups to the lighthouse: closed",
            *(334, groups.sessions_closed),
            holds="no group is lost",
        ),
        Row(
            "groups_killed_at_the_end",
            "a random group of 4 in each of the last 5 steps: SIGKILL; from the last kill to the end of all",
            *(100, groups.groups_killed_at_the_end),
            holds="all groups finish together, with equal weights",
        ),
        Row(
            "group_killed_while_it_catches_up",
            "1 of 3 groups: SIGKILL at any moment of its join, and again",
            *(20, groups.group_killed_while_it_catches_up, Limit("p95", 0.5)),
            holds="the others do not wait for its state; it comes back equal",
        ),
        Row(
            *("relay_killed", "the relay: SIGKILL while 1 of 3 groups heals", 20, groups.relay_killed),
            holds="the group heals anyway",
        ),
        Row(
            *(
                "healed_through_relay",
                "1 of 3 groups: SIGKILL; it heals through a relay",
                200,
                groups.healed_through_relay,
            ),
            holds="a relay serves each heal; a source has no more threads, descriptors and memory than before",
        ),
        Row(
            *("group_frozen", "1 of 3 groups: SIGSTOP, and SIGCONT later", 3, groups.group_frozen, SILENCE),
            holds="it comes back equal",
        ),
        Row(
            *("group_isolated", "1 of 3 groups cut off from everything", 3, groups.group_isolated, SILENCE),
            holds="it comes back equal",
            cuts_network=True,
            namespaces_only=True,
        ),
        Row(
            *("groups_cut_off", "2 of 3 groups cut off from each other; timeout 5 s", 3, probation.groups_cut_off),
            *(Limit("worst", probation.TWO_ROUNDS), KEEP_PACE),
            cuts_network=True,
            namespaces_only=True,
        ),
        Row(
            *("groups_cut_off_one_way", "1 of 3 groups does not reach another; timeout 5 s", 3),
            *(probation.groups_cut_off_one_way, Limit("worst", probation.TWO_ROUNDS), KEEP_PACE),
            cuts_network=True,
            namespaces_only=True,
        ),
        Row(
            *("link_flaps", "the link of 2 of 3 groups: 4 s down, 2 s up, again and again; timeout 5 s", 3),
            *(probation.link_flaps, Limit("worst", probation.TWO_ROUNDS), KEEP_PACE),
            cuts_network=True,
            namespaces_only=True,
        ),
        Row(
            *("group_fails_by_itself", "1 of 3 groups reports an error of its own in each step", 3),
            *(probation.group_fails_by_itself, Limit("worst", probation.TWO_STEPS), KEEP_PACE),
        ),
        Row(
            *("heals_fail", "a third group joins, and each of its heals fails; it is started again", 3),
            *(probation.heals_fail, Limit("worst", probation.TWO_STEPS), KEEP_PACE),
        ),
    )
}


async def play(
    name: str, times: int = 0, *, proxies: bool = False, say: Callable[[str], None] = print, keep: Path | None = None
) -> Outcome:
    """Run the row ``name``.

    Args:
        name: Key of ``ROWS``.
        times: Number of repetitions; 0 is the number in the table.
        proxies: Cut the network with TCP proxies even where network namespaces are available.
        say: Called with a line of progress per repetition.
        keep: Folder for the logs; None discards them.
    """
    row = ROWS[name]
    proxies = proxies or namespaces.why_not() is not None
    return await Run(row, times or row.times, proxies=proxies, say=say, keep=keep).play()
