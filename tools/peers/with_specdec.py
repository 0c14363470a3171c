"""This system: target on one core, draft, orchestrator and client on the other, asked over gRPC like any client would.

`--way alone` is the target without a draft on all cores: what the same engine does when nothing is spent on speculation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import peer

from specdec.bench.experiment import DRAFT_S
from specdec.bench.load import Question, ask_all
from specdec.bench.system import Models, default_pins, pools
from specdec.client import Client, Options
from specdec.errors import Unsupported
from specdec.terms import SamplingParams

WAYS: dict[str, Options] = {
    "alone": {"disable_spec_decode": True},
    "none": {"disable_spec_decode": True},
    "fixed": {"enable_adaptive_verification": False},
    "auto": {"enable_adaptive_verification": True},
}


def main() -> None:
    flags = peer.parser(__doc__)
    flags.add_argument("--way", choices=tuple(WAYS), required=True)
    options = flags.parse_args()
    alone = options.way == "alone"
    models = Models(options.model, None if alone else options.draft)
    with pools(models, {} if alone else default_pins(), {"THREADS": str(options.threads)} if alone else {}) as running:
        endpoint = running.start_orchestrator().endpoint
        with asyncio.Runner() as runner:
            client = Client(endpoint)

            def load() -> peer.Generate:
                runner.run(_ready(client, draft=not alone))
                return lambda *asked: runner.run(_answers(client, WAYS[options.way], *asked))

            try:
                peer.run(options, load, ("specdec", "torch", "grpcio"))
            except Unsupported as error:
                peer.say({"skipped": f"the service does not serve it: {error}"})
            finally:
                runner.run(client.close())


async def _ready(client: Client, draft: bool) -> None:
    await client.wait_ready(10.0)
    async with asyncio.timeout(DRAFT_S):
        while draft and not (await client.get_model_info()).draft_available:
            await asyncio.sleep(0.1)


async def _answers(client: Client, options: Options, prompts: Sequence[peer.Ids], max_tokens: int, streams: int) -> list[peer.Ids]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    questions = [Question("", prompt, seed=0) for prompt in prompts]
    done: Any = await ask_all(client, questions, sampling, options, streams)
    return [list(answer.token_ids) for answer in done.answers]


if __name__ == "__main__":
    main()
