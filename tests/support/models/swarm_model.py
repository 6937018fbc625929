"""Joiners in virtual time, each with the real ``Swarm``, on a network in which every host's link is the limit.

All links, of the source, the relay and each joiner, carry one chunk a second in each direction; the transfers on them
share them fairly (max-min), as TCP roughly does. A joiner that is asked by more than ``PEERS_AT_ONCE`` refuses; the
others hear ``TELL`` later at most what one has.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass

from keepstep.transfer.peer_choice import PEERS_AT_ONCE, RELAY, SOURCE, Swarm

TELL = 0.25
LOOK = 0.15
"""A joiner that was refused asks the same one again after that, and looks for something to ask after that."""
DEADLINE = 1000.0


@dataclass(eq=False)
class Transfer:
    """Of one chunk."""

    sender: str
    receiver: str
    chunk: int
    left: float = 1.0
    rate: float = 0.0


class Network:
    def __init__(self, joiners: int, chunks: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.chunks = chunks
        self.swarms = {f"j{me}": Swarm(chunks, me, joiners, 0.0) for me in range(joiners)}
        self.told = dict.fromkeys(self.swarms, 0)
        self.next_told = {name: TELL * self.rng.random() for name in self.swarms}
        self.asks_again: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.at_relay = 0
        self.transfers = [Transfer(SOURCE, RELAY, 0)]
        self.waiting: list[Transfer] = []
        """For chunks that the relay does not have yet."""
        self.sent_by: Counter[str] = Counter()
        self.now = 0.0

    def run(self, lost: str | None = None) -> float:
        """Seconds until all have all. ``lost`` dies after a third of the time that one copy takes."""
        while not all(swarm.finished for swarm in self.swarms.values()):
            assert self.now < DEADLINE, {name: bin(swarm.done) for name, swarm in self.swarms.items()}
            if lost in self.swarms and self.now > self.chunks / 3:
                self._lose(lost)
            for receiver in self.rng.sample(sorted(self.swarms), len(self.swarms)):
                self._ask(receiver)
            self._pass()
        return self.now

    def _ask(self, receiver: str) -> None:
        swarm = self.swarms[receiver]
        busy = {one.sender for one in (*self.transfers, *self.waiting) if one.receiver == receiver}
        senders = [RELAY, *self.rng.sample(sorted(self.swarms), len(self.swarms))]
        for sender in senders:
            if sender in busy or sender == receiver or self.now < self.asks_again[receiver, sender]:
                continue
            chunk = swarm.take(sender, self.now)
            if chunk is None:
                continue
            serves = sum(one.sender == sender for one in self.transfers)
            if sender == RELAY:
                self.waiting.append(Transfer(sender, receiver, chunk))
            elif serves < PEERS_AT_ONCE:
                self.transfers.append(Transfer(sender, receiver, chunk))
            else:
                swarm.failed(chunk)
                self.asks_again[receiver, sender] = self.now + LOOK

    def _pass(self) -> None:
        """Time, until something happens."""
        for one in [one for one in self.waiting if one.chunk < self.at_relay]:
            self.waiting.remove(one)
            self.transfers.append(one)
        share(self.transfers)
        seconds = min([LOOK, *(one.left / one.rate for one in self.transfers)])
        self.now += seconds
        for one in list(self.transfers):
            one.left -= one.rate * seconds
            if one.left < 1e-9:
                self.transfers.remove(one)
                self._came(one)
        for name, when in self.next_told.items():
            if when <= self.now and name in self.swarms:
                self.next_told[name] = self.now + TELL
                self.told[name] = self.swarms[name].done
                for other in self.swarms.keys() - {name}:
                    self.swarms[name].set_peer_chunks(other, self.told[other])

    def _came(self, one: Transfer) -> None:
        self.sent_by[one.sender] += 1
        if one.receiver == RELAY:
            self.at_relay += 1
            if self.at_relay < self.chunks:
                self.transfers.append(Transfer(SOURCE, RELAY, self.at_relay))
        elif one.receiver in self.swarms:
            self.swarms[one.receiver].record_arrival(one.chunk, self.now)

    def _lose(self, lost: str) -> None:
        del self.swarms[lost]
        for one in [one for one in self.transfers if lost in (one.sender, one.receiver)]:
            self.transfers.remove(one)
            if one.receiver in self.swarms:
                self.swarms[one.receiver].failed(one.chunk)
        self.waiting = [one for one in self.waiting if one.receiver != lost]
        for swarm in self.swarms.values():
            swarm.forget(lost)


def share(transfers: list[Transfer]) -> None:
    """Rates: the link with the least for each of its transfers is shared out first."""
    links: defaultdict[tuple[str, str], list[Transfer]] = defaultdict(list)
    for one in transfers:
        one.rate = 0.0
        links["up", one.sender].append(one)
        links["down", one.receiver].append(one)
    open_ones = set(transfers)

    def part(link: list[Transfer]) -> float:
        return max(0.0, 1.0 - sum(one.rate for one in link)) / sum(one in open_ones for one in link)

    while open_ones:
        scarcest = min((link for link in links.values() if not open_ones.isdisjoint(link)), key=part)
        rate = part(scarcest)
        for one in open_ones.intersection(scarcest):
            one.rate = max(rate, 1e-9)
        open_ones.difference_update(scarcest)
