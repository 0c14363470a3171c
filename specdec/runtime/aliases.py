"""Names that vLLM's users scrape already, for what our metrics say under their own. Filled when somebody scrapes; nothing is kept.

`model_name` is the model served at that moment and `engine` always 0, so the labels are as bounded as what they are copied from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specdec.runtime.instruments import Family, Instruments

KV_USAGE = "vllm:kv_cache_usage_perc"
NO_MODEL = "unknown"  # no target has said yet which one


@dataclass(frozen=True, slots=True)
class Alias:
    of: str  # a metric of metrics.py, counter or gauge
    description: str


ALIASES: dict[str, Alias] = {
    "vllm:num_requests_running": Alias("specdec.requests.running", "Generations in progress."),
    "vllm:num_requests_waiting": Alias("specdec.requests.waiting", "Generations admitted and not yet started."),
    "vllm:generation_tokens": Alias("specdec.delivered.tokens", "Tokens handed to clients."),
    "vllm:spec_decode_num_drafts": Alias("specdec.draft.rounds", "Rounds with a block."),
    "vllm:spec_decode_num_draft_tokens": Alias("specdec.draft.tokens", "Proposed tokens that were verified."),
    "vllm:spec_decode_num_accepted_tokens": Alias("specdec.accepted.tokens", "Proposed tokens that were kept."),
    "vllm:spec_decode_num_accepted_tokens_per_pos": Alias("specdec.accepted.tokens.per_position", "Kept tokens by slot of the block."),
}


class Aliases:
    """A collector of prometheus_client. `model` = the name of the model served, empty while unknown; `kv_usage` = share of KV in use."""

    def __init__(self, instruments: Instruments, model: Callable[[], str], kv_usage: Callable[[], float]) -> None:
        self._instruments, self._model, self._kv_usage = instruments, model, kv_usage

    def collect(self) -> Iterator[Family]:
        common = {"model_name": self._model() or NO_MODEL, "engine": "0"}
        held = self._instruments.families([alias.of for alias in ALIASES.values()])
        for name, alias in ALIASES.items():
            source = held.get(alias.of)
            if source is None:
                continue
            family = Family(name, alias.description, source.type)
            total = "_total" if source.type == "counter" else ""
            for sample in source.samples:
                family.add_sample(name + total, {**common, **sample.labels}, sample.value)
            if not source.samples and not alias.of.endswith("per_position"):  # a scaler that asks finds 0, not nothing
                family.add_sample(name + total, common, 0.0)
            yield family
        usage = Family(KV_USAGE, "Share of the targets' KV room in use.", "gauge")
        usage.add_sample(KV_USAGE, common, self._kv_usage())
        yield usage
