"""An orchestrator without pools: answers with a script, or with what the prompt asks for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from specdec import wire
from specdec.errors import InvalidRequest, Overloaded, Unavailable, Unsupported
from specdec.runtime.server import Runtime, Service, serve
from specdec.runtime.settings import CommonSettings
from specdec.seeds import answer_seed
from specdec.terms import Origin
from specdec.v1 import common_pb2, generation_pb2, generation_pb2_grpc

PIECES = ((10, "Hel", Origin.PLAIN), (11, "lo ", Origin.ACCEPTED), (12, "wörld", Origin.BONUS))
METRICS = """\
target_info{{service_name="specdec-orchestrator",service_instance_id="fake"}} 1.0
specdec_spec_enabled 1.0
specdec_spec_wanted 1.0
specdec_round_duration_seconds_count{{phase="engine"}} 1000.0
specdec_round_duration_seconds_sum{{phase="engine"}} 20.0
specdec_rounds_total {rounds}
specdec_draft_rounds_total 800.0
specdec_draft_tokens_total 2400.0
specdec_accepted_tokens_total 1200.0
specdec_accepted_tokens_per_position_total{{position="0"}} 640.0
specdec_decided_tokens_total{{origin="plain"}} {tokens}
specdec_delivered_tokens_total {tokens}
specdec_target_batch_size_count {rounds}
specdec_target_batch_size_sum {rows}
vllm:kv_cache_usage_perc{{model_name="fake",engine="0"}} 0.25
"""


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    pass


class Scripted(generation_pb2_grpc.GenerationServiceServicer):
    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        sampling = wire.sampling_from_wire(request.sampling)
        match request.text or "".join(turn.content for turn in request.messages.messages):
            case "invalid":
                raise InvalidRequest("sampling.top_p", "must be in (0, 1]")
            case "full":
                raise Overloaded("all places are taken", 250)
            case "cut":
                yield started(request)
                return
            case "broken":
                yield started(request)
                yield next(deltas(request, sampling, 0))
                raise Unavailable("the last target is gone")
            case "slow":
                yield started(request)
                await asyncio.sleep(30)
            case "fields":
                raise Unsupported(request.model, "told to")
            case "too many":
                request.n = (request.n or 1) + 1
        for message in mixed(request, sampling):
            yield message

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        info = common_pb2.ModelInfo(model="fake", vocab_size=20)
        return generation_pb2.GetModelInfoResponse(info=info, draft_available=True, num_speculative_tokens=3)

    looks = 0

    async def GetMetrics(self, request: Any, context: Any) -> Any:
        """Ten rounds since the call before, of two tokens each, in steps of four rows."""
        self.looks += 1
        rounds = 1000 + 10 * self.looks
        return generation_pb2.GetMetricsResponse(text=METRICS.format(rounds=rounds, tokens=2 * rounds, rows=4 * rounds))

    async def Tokenize(self, request: Any, context: Any) -> Any:
        turns = [len(m.content) for m in request.messages.messages]
        if turns and request.messages.HasField("add_generation_prompt"):
            turns += [int(request.messages.add_generation_prompt), len(request.messages.template_args)]
        return generation_pb2.TokenizeResponse(token_ids=turns or [len(request.text), int(request.add_special_tokens)])

    async def Detokenize(self, request: Any, context: Any) -> Any:
        return generation_pb2.DetokenizeResponse(text=f"{list(request.token_ids)} {request.skip_special_tokens}")


def mixed(request: Any, sampling: Any) -> Iterator[Any]:
    """The messages of all answers, the later ones a little ahead of the earlier: answer i says its text i + 1 times."""
    n = request.n or 1
    waiting = [[started(request, i), *deltas(request, sampling, i), finished(request, sampling, i)] for i in reversed(range(n))]
    while waiting:
        for messages in waiting:
            yield messages.pop(0)
        waiting = [messages for messages in waiting if messages]


def deltas(request: Any, sampling: Any, index: int) -> Iterator[Any]:
    prompt_logprobs = [] if sampling.prompt_logprobs is None or index else [logprobs(sampling.prompt_logprobs)]
    for token, text, origin in (PIECES * (index + 1))[len(request.output_token_ids) :]:
        entries = [] if sampling.logprobs is None else [logprobs(sampling.logprobs)]
        message = generation_pb2.Delta(
            token_ids=[token], text=text, origins=[wire.origin_to_wire(origin)], logprobs=entries, prompt_logprobs=prompt_logprobs
        )
        prompt_logprobs = []
        yield generation_pb2.GenerateResponse(index=index, delta=message)


def logprobs(count: int) -> Any:
    return common_pb2.TokenLogprobs(logprob=-0.5, top_ids=[1] * count, top_logprobs=[-0.25] * count)


def started(request: Any, index: int = 0) -> Any:
    seed = answer_seed(request.seed if request.HasField("seed") else 2**64 - 1, index)
    message = generation_pb2.Started(request_id="r", seed=seed, prompt_tokens=5, model="fake")
    return generation_pb2.GenerateResponse(index=index, started=message)


def finished(request: Any, sampling: Any, index: int) -> Any:
    k = request.num_speculative_tokens if request.HasField("num_speculative_tokens") else 3
    k = 0 if request.disable_spec_decode else k
    message = generation_pb2.Finished(
        finish_reason=common_pb2.FINISH_REASON_LENGTH,
        usage=generation_pb2.Usage(prompt_tokens=5, completion_tokens=3),
        speculative=generation_pb2.SpeculativeStats(
            mean_acceptance_length=2.5, acceptance_histogram=[0, 1], num_draft_tokens=k, hit_rate=0.5, num_spec_steps=1
        ),
        settings=generation_pb2.EffectiveSettings(sampling=wire.sampling_to_wire(sampling), num_speculative_tokens=k, batch_invariant=True),
    )
    return generation_pb2.GenerateResponse(index=index, finished=message)


async def build(settings: Settings, runtime: Runtime) -> Service:
    return Service(add=lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(Scripted(), server))


if __name__ == "__main__":
    sys.exit(serve("orchestrator", Settings, build))
