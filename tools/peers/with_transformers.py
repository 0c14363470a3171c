"""transformers on the CPU: generate(), with or without a draft (assisted generation) or prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peer
import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    flags = peer.parser(__doc__)
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    flags.add_argument("--lookup", type=int, default=0, help="tokens that prompt lookup proposes; 0 = none")
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    speculative = options.draft is not None or options.lookup > 0

    def load() -> peer.Generate:
        model = _model(options.model, options.dtype)
        more: dict[str, Any] = {"prompt_lookup_num_tokens": options.lookup} if options.lookup else {}
        if options.draft is not None:
            more["assistant_model"] = _model(options.draft, options.dtype)

        @torch.inference_mode()
        def generate(prompts: Sequence[peer.Ids], max_tokens: int, streams: int) -> list[peer.Ids]:
            answers: list[peer.Ids] = []
            for wave in peer.waves(prompts, streams):
                ids, mask = _padded(wave)
                out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, **more)
                answers += out[:, ids.shape[1] :].tolist()
            return answers

        return generate

    # Assisted generation takes a batch of one.
    peer.run(options, load, ("transformers", "torch"), most_streams=1 if speculative else None)


def _model(folder: Any, dtype: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.temperature, settings.top_p = None, 0, None, None
    return model


def _padded(prompts: Sequence[peer.Ids]) -> tuple[torch.Tensor, torch.Tensor]:
    """On the left, as generation wants it."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


if __name__ == "__main__":
    main()
