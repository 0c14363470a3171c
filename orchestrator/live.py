"""A session as the driver knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.alarms import Alarms
from orchestrator.generation import Generation
from orchestrator.handle import Undelivered
from orchestrator.hunger import Hunger
from orchestrator.pace import Pace
from orchestrator.places import About
from orchestrator.tracing import UNTRACED, SessionTrace


@dataclass(slots=True)
class Live:
    generation: Generation
    pace: Pace
    undelivered: Undelivered
    request_id: str
    younger: tuple[str, ...] = ()  # sessions that wait until this one has computed their common prompt
    target: str = ""  # as counted in Pool.places
    draft: str = ""
    numerics: str = ""  # of its first target
    timers: Alarms = field(default_factory=Alarms)
    step_sent: float = 0.0  # when the Step left that no answer has come for; 0: none waits, the target goes on by itself
    answered: float = 0.0  # when the last answer came; 0 once a Step has followed it
    hunger: Hunger = field(default_factory=Hunger)
    trace: SessionTrace = UNTRACED

    def about(self) -> About:
        """What its place at a target depends on."""
        request = self.generation.request
        most = request.window - request.prompt_length
        window = request.prompt_length + min(most, request.sampling.max_tokens or most)
        return About(self.numerics, self.generation.committed, window=window, block=request.max_block)
