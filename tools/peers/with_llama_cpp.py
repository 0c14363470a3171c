"""llama.cpp's server inside this process, through its Python wheel: plain or with a draft. Both models are GGUF files."""

from __future__ import annotations

import importlib
import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peer

CONTEXT = 512  # tokens a stream


def main() -> None:
    flags = peer.parser(__doc__)
    flags.add_argument("--proposals", type=int, default=3, help="most tokens the draft proposes")
    options = flags.parse_args()
    slots = max(int(part) for part in options.streams.split(","))
    kept: list[Any] = []  # the server lives as long as this process

    def load() -> peer.Generate:
        llama: Any = importlib.import_module("xllamacpp")
        params = llama.CommonParams()
        params.model.path = str(options.model)
        params.n_parallel, params.n_ctx, params.n_gpu_layers = slots, slots * CONTEXT, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
        params.cache_prompt, params.cache_ram_mib, params.warmup, params.fit_params = False, 0, True, False
        params.port, params.hostnames = 0, ["127.0.0.1"]
        params.verbosity = 1
        if options.draft is not None:
            draft = params.speculative.draft
            params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            draft.mparams.path, draft.n_max, draft.n_gpu_layers = str(options.draft), options.proposals, 0
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = options.threads
        server = llama.Server(params)
        kept.append(server)
        address = str(server.listening_address)

        def generate(prompts: Sequence[peer.Ids], max_tokens: int, streams: int) -> list[peer.Ids]:
            with ThreadPoolExecutor(streams) as clients:
                return list(clients.map(lambda prompt: _ask(address, prompt, max_tokens), prompts))

        return generate

    peer.run(options, load, ("xllamacpp",))


def _ask(address: str, prompt: peer.Ids, max_tokens: int) -> peer.Ids:
    """Greedy; the server forbids the end-of-sequence id where others take it as an ordinary one."""
    body = {
        "prompt": prompt, "n_predict": max_tokens, "temperature": 0.0, "top_k": 1, "ignore_eos": True, "cache_prompt": False,
        "return_tokens": True, "stream": False,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return list(json.load(answer)["tokens"])


if __name__ == "__main__":
    main()
