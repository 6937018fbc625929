from __future__ import annotations

import torch

from keepstep.one_copy.copies.copy_server import CopyServer, Served
from keepstep.one_copy.copies.keeper import Keeper
from keepstep.one_copy.copies.rank_state import RankState
from keepstep.one_copy.copies.shard_reader import ShardReader
from keepstep.one_copy.core.holding import Holding, State
from keepstep.one_copy.core.recovery_plan import Kind, Recovery, Source, Way
from keepstep.one_copy.core.world import Seat, World
from keepstep.one_copy.recovery.sources import Sources, serving
from keepstep_mesh.security.tokens import ClientToken

AT = State(3, 3)


def test_what_this_process_has_is_cut_again_without_a_connection() -> None:
    """Also the copy that it keeps of another rank. The reader has a wrong token: each connection would be refused."""
    token, model = ClientToken.of("right"), torch.nn.Linear(3, 2)
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(2.0)))
    state = RankState(model, torch.optim.Adam(model.parameters(), lr=0.1))
    sum(one.sum() for one in state.parameters).backward()  # type: ignore[union-attr]
    state.optimizer.step()
    world = World(1, 1, (Seat("a", "host"),), 1)
    server = CopyServer("127.0.0.1", token, Keeper(torch.optim.SGD, lambda: torch.device("cpu"), lambda: 1 << 30), 30.0)
    try:
        holding = Holding("a", 0, "host", server.address, (), (), True)
        recovery = Recovery(Kind.RESIZED, world, world, AT, (Source(0, 0, Way.LIVE),), (0,), 0, ())
        reader = ShardReader(ClientToken.of("wrong"), 1, AT, 30.0, lambda: "")
        end = {"options": state.options(), "buffers": {}, "random": {}, "skipped": False}
        shared = {"scheduler": {"last_epoch": 3, "rates": [0.1]}}
        served = Served(1, 0, AT, state.names_of_slices(), state.base, end, shared, state.boxes)
        with serving(server, served):
            sources = Sources(recovery, [holding], reader, server)
            found, told = sources.cut_again(state, 0), sources.shared()
        for name, one in zip(state.names, state.parameters, strict=True):
            assert torch.equal(found[name]["parameter"], one)
            assert found[name]["parameter"].data_ptr() != one.data_ptr(), "the shard of before stays as it is"
            kept = state.optimizer.state[one]["exp_avg"]
            assert torch.equal(found[name]["state"]["exp_avg"], kept)
            assert found[name]["state"]["exp_avg"].data_ptr() != kept.data_ptr()
        assert told["shared"] == shared
        assert told["shared"]["scheduler"]["rates"] is not shared["scheduler"]["rates"]
    finally:
        server.close()
