"""`python -m orchestrator`: the service that clients call. Settings: SPECDEC_* variables, see settings.py."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that take seconds
    from specdec.runtime.early import leave_on_signals

    leave_on_signals()

import asyncio
import sys
import time

from orchestrator.driver import Driver
from orchestrator.fronts.grpc import GenerationServicer
from orchestrator.fronts.meters import Meters
from orchestrator.fronts.requests import Defaults
from orchestrator.observe import Observer
from orchestrator.readiness import Readiness
from orchestrator.scaling.service import Scaling
from orchestrator.settings import OrchestratorSettings
from orchestrator.text import TextModel
from specdec.runtime import process
from specdec.runtime.hangup import STATUS_S
from specdec.runtime.server import Runtime, Service, serve
from specdec.runtime.trial import Trial


async def build(settings: OrchestratorSettings, runtime: Runtime) -> Service:
    """Takes calls as soon as it can answer: a pool that is empty for now delays or fails calls, never the start. `readiness` says more."""
    trial = Trial(settings.tokenizer)
    text = await asyncio.to_thread(TextModel, settings.tokenizer, trial)
    driver = Driver(settings, text.vocabulary.fingerprint, Observer(runtime.telemetry))
    defaults = Defaults(
        settings.num_speculative_tokens,
        settings.enable_adaptive_verification,
        settings.rejection_sample_method,
        settings.draft_sample_method,
    )
    meters = Meters(runtime.telemetry, content=settings.trace_content)
    unread_s = 2 * settings.max_unread_ms / 1000 + STATUS_S
    servicer = GenerationServicer(driver, text, defaults, meters, unread_s, settings.shows_metrics)
    process.rarely_collect()
    driver.run()
    scaling = Scaling(settings, driver, runtime.telemetry)
    await scaling.start()
    readiness = Readiness(settings.placement_wait_ms)

    def ready() -> bool:
        return readiness.may_take(len(driver.pools.targets.eligible()), time.monotonic())

    async def close() -> None:
        await scaling.close()
        await driver.close()
        servicer.close()
        await asyncio.to_thread(trial.close)

    return Service(add=servicer.register, drain=driver.drained, give_up=driver.give_up, close=close, ready=ready)


if __name__ == "__main__":
    sys.exit(serve("orchestrator", OrchestratorSettings, build))
