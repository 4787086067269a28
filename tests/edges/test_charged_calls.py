"""A call of a tenant with limits, over a link: Charge and Arrive are two frames, so their requests are two objects."""

from __future__ import annotations

from seam.core_stage import CoreStage
from seam.scenarios import SCRIPTS

from warmroute.core.messages import Arrive, Charge, RoutingRequest, Send


async def test_what_the_prompt_says_counts_although_the_charge_did_not_know_it() -> None:
    stage = CoreStage()
    await stage.open(SCRIPTS[0])
    first, second = (RoutingRequest("m", tenant="a", arrived_s=stage.now_s) for _ in range(2))
    second.input_tokens, second.input_exact, second.may_split = 5000, True, True
    stage.brain.handle(Charge(1, 100, True, first), stage.now_s)
    [command] = stage.brain.handle(Arrive(1, b"id", second), stage.now_s)
    assert isinstance(command, Send)
    assert stage.brain.open[1].request is second
