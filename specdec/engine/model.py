"""From a model folder, or a module, to an engine: which path, which numbers, what it may claim."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.engine.api import QUANTISED, Engine, EngineConfig, EngineInfo, UnsupportedModel
from specdec.engine.attention import KEY_BLOCK, QUERY_ROWS, Attention, RowAttention
from specdec.engine.invariance import examine
from specdec.engine.kv import KvStore
from specdec.engine.lean import LeanModel
from specdec.engine.native import Descriptors, Kernels, NativeModel, load_kernels, why_not
from specdec.engine.padded import SHORT, PaddedAttention
from specdec.engine.paged import PagedStore
from specdec.engine.quantize import Linears, has_vnni, supported
from specdec.engine.ragged import Model, Planner, RaggedEngine, Store
from specdec.engine.shape import LlamaShape, llama_shape, refuse_if_unable_to_roll_back
from specdec.engine.sim import simulated_engine
from specdec.engine.weights import FolderWeights, eos_ids, read_config, read_draft_ids, read_eos_ids, safetensors_of, weights_digest
from specdec.vocabulary import vocabulary

INCIDENTAL = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"})  # of config.json
log = logging.getLogger(__name__)


def load_engine(config: EngineConfig) -> Engine:
    """Call it on the thread that will own the engine. Raises UnsupportedModel."""
    folder = Path(config.model_dir)
    if config.path == "sim":
        return simulated_engine(config, vocabulary(folder))
    raw = read_config(folder)
    source = _Source(raw, read_eos_ids(folder, raw), None)
    if config.reduced_head:
        source = replace(source, draft_ids=read_draft_ids(folder, raw["vocab_size"]))
    shape = _choose(raw, config)
    if isinstance(shape, LlamaShape):
        return _build_lean(source, config, shape, FolderWeights(folder))
    return _build_generic(source, config, _load_module(folder, config), weights_digest(FolderWeights(folder)))


def load_engine_from_module(module: Any, config: EngineConfig) -> Engine:
    """From a transformers model in memory, which the generic path takes over (it swaps parts of it)."""
    raw = module.config.to_dict()
    generation = getattr(module, "generation_config", None)
    source = _Source(raw, eos_ids(raw, {} if generation is None else generation.to_dict()), None)
    shape = _choose(raw, config)
    if isinstance(shape, LlamaShape):
        return _build_lean(source, config, shape, dict(module.state_dict()))
    return _build_generic(source, config, module)


@dataclass(frozen=True, slots=True)
class _Source:
    """`raw` = config.json."""

    raw: Mapping[str, Any]
    eos_ids: tuple[int, ...]
    draft_ids: tuple[int, ...] | None


def _choose(raw: Mapping[str, Any], config: EngineConfig) -> LlamaShape | None:
    """The shape for the lean path, None for the generic one. Raises UnsupportedModel."""
    refuse_if_unable_to_roll_back(raw, _window(raw, config))
    if config.path == "generic":
        return None
    shape = llama_shape(raw)
    if isinstance(shape, LlamaShape):
        return shape
    if config.path == "lean":
        raise UnsupportedModel(f"the lean path cannot serve this model: {shape}; use path auto or generic")
    log.info("generic path: %s", shape)
    return None


def _window(raw: Mapping[str, Any], config: EngineConfig) -> int:
    made_for = raw.get("max_position_embeddings") or raw.get("n_positions")
    bounds = [bound for bound in (made_for, config.window, config.kv_tokens) if bound]
    return min(bounds)


def load_engine_from_weights(raw: Mapping[str, Any], weights: Mapping[str, Tensor], config: EngineConfig, digest: str) -> Engine:
    """From tensors named as in the files, wherever they are, by the lean path. `raw` = config.json; `digest` stands for their hash.

    Raises UnsupportedModel.
    """
    shape = _choose(raw, replace(config, path="lean"))
    assert isinstance(shape, LlamaShape)
    return _build_lean(_Source(raw, eos_ids(raw), None), config, shape, weights, digest)


def _build_lean(source: _Source, config: EngineConfig, shape: LlamaShape, weights: Mapping[str, Tensor], digest: str = "") -> Engine:
    kernels = _kernels(config, shape, weights)
    if kernels is not None:
        return _build_native(kernels, source, config, shape, weights, digest)
    config, place = _settle(config), _device(config)
    window = _window(source.raw, config)
    linears = Linears(config.dtype, config.max_rows, place)
    store, attention = _memory(config, place, _Sizes(shape.layers, shape.heads, shape.kv_heads, shape.dim, window), stacked=True)
    head_ids = None if source.draft_ids is None else torch.tensor(source.draft_ids)
    replays = config.replay and config.device == "cuda"
    with torch.inference_mode():
        model = LeanModel(shape, weights, linears, attention, window, head_ids, place, replays)
    digest = digest or weights_digest(weights)
    return _finish(source, config, store, attention, model, "lean", _fingerprint(config, "lean", digest), digest)


def _kernels(config: EngineConfig, shape: LlamaShape, weights: Mapping[str, Tensor]) -> Kernels | None:
    """Where compiled code is to compute this model and can."""
    if config.dtype not in QUANTISED or not config.native:
        return None
    reason = why_not(shape, len(weights["model.layers.0.mlp.gate_proj.weight"]))
    if reason is not None:
        log.info("%s is computed by torch: %s", config.dtype, reason)
        return None
    return load_kernels()


def _build_native(
    kernels: Kernels, source: _Source, config: EngineConfig, shape: LlamaShape, weights: Mapping[str, Tensor], digest: str
) -> Engine:
    torch.set_num_threads(config.threads)
    window = _window(source.raw, config)
    store = KvStore(shape.layers, shape.kv_heads, shape.dim, torch.float32, window=window, total_tokens=config.kv_tokens)
    head_ids = None if source.draft_ids is None else torch.tensor(source.draft_ids)
    with torch.inference_mode():
        coded = config.dtype == "int4"
        model = NativeModel(
            kernels, shape, weights, window=window, max_rows=config.max_rows, threads=config.threads, head_ids=head_ids, coded=coded
        )
    # The same on any CPU: integer sums are exact, float sums have one order. Frequencies come of torch's own power.
    digest = digest or weights_digest(weights)
    parts = [digest, f"{config.dtype} native", kernels.source, shape.frequencies.numpy().tobytes().hex()]
    return _finish(source, config, store, Descriptors(), model, "lean", _hashed(parts), digest)


class PlannedAttention(Planner, RowAttention, Protocol):
    """Both in one."""


class _Sizes(NamedTuple):
    """What attention and K/V need to know of a model."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    window: int


def _memory(config: EngineConfig, place: torch.device | None, sizes: _Sizes, stacked: bool) -> tuple[Store, PlannedAttention]:
    """K/V and the attention over it. `stacked`: queries come in rows with the keys and values behind them."""
    kind = _torch_dtype(config)
    layers, heads, kv_heads, dim, window = sizes
    row_heads = heads + 2 * kv_heads if stacked else heads
    if place is None:
        store = KvStore(layers, kv_heads, dim, kind, window=window, total_tokens=config.kv_tokens)
        return store, Attention(heads, kv_heads, window, kind, row_heads=row_heads)
    paged = PagedStore(layers, kv_heads, dim, kind, place, total_tokens=config.kv_tokens)
    return paged, PaddedAttention(heads, kv_heads, kind, place, paged, row_heads=row_heads)


def _device(config: EngineConfig) -> torch.device | None:
    """The accelerator; None = this machine's CPU, whose memory and kernels have a code of their own."""
    return None if config.device == "cpu" else torch.device(config.device)


def _load_module(folder: Path, config: EngineConfig) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    safetensors_of(folder)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # a service's log is no terminal
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=_torch_dtype(config), local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except ValueError as error:
        raise UnsupportedModel(f"{folder} holds no causal language model that transformers can read: {error}") from error


def _build_generic(source: _Source, config: EngineConfig, module: Any, digest: str = "") -> Engine:
    from specdec.engine.generic import GenericModel, module_weights, refuse_stateful

    refuse_stateful(module)
    config, place = _settle(config), _device(config)
    module = module.to(device=place, dtype=_torch_dtype(config))
    digest = digest or weights_digest(module_weights(module))
    text = module.config.get_text_config(decoder=True)
    layers, heads = text.num_hidden_layers, text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    sizes = _Sizes(layers, heads, kv_heads, dim, _window(source.raw, config))
    store, attention = _memory(config, place, sizes, stacked=False)
    model = GenericModel(module, Linears(config.dtype, config.max_rows), attention, layers)
    source = replace(source, draft_ids=None)
    return _finish(source, config, store, attention, model, "generic", _fingerprint(config, "generic", digest), digest)


def _settle(config: EngineConfig) -> EngineConfig:
    torch.set_num_threads(config.threads)
    if config.device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans every shape anew, and shapes here are many
    return replace(config, dtype=supported(config.dtype))


def _torch_dtype(config: EngineConfig) -> torch.dtype:
    """Of activations and K/V."""
    kind: torch.dtype = torch.float32 if config.dtype in QUANTISED else getattr(torch, config.dtype)
    return kind


def _finish(
    source: _Source,
    config: EngineConfig,
    store: Store,
    attention: Planner,
    model: Model,
    path: str,
    fingerprint: str,
    digest: str,
) -> Engine:
    """`digest` = of the weights."""
    info = EngineInfo(
        vocab_size=source.raw["vocab_size"],
        window=_window(source.raw, config),
        eos_ids=source.eos_ids,
        dtype=config.dtype,
        path=path,
        batch_invariant=False,
        numerics_fingerprint=fingerprint,
        kv_total_tokens=store.total_tokens,
        max_rows=config.max_rows,
        draft_ids=source.draft_ids,
        model_fingerprint=_hashed([digest, _computed(source.raw)]),
    )
    engine = RaggedEngine(info, store, attention, model)
    if config.self_test:
        engine.info = replace(info, batch_invariant=examine(engine))
        log.info("self-test: batch_invariant=%s (%s, %s)", engine.info.batch_invariant, config.dtype, path)
    return engine


def _fingerprint(config: EngineConfig, path: str, weights: str) -> str:
    """Equal for engines whose bits must be equal. Float products may be split over threads, integer sums do not notice."""
    parts = [weights, config.dtype, path, torch.__version__, torch.backends.cpu.get_cpu_capability(), config.device]
    if config.device != "cpu":
        parts += [f"padded {SHORT}", *accelerator_name()]
    else:
        parts += [f"attention {QUERY_ROWS} {KEY_BLOCK}"]
        parts += [f"vnni {has_vnni()}"] if config.dtype == "int8" else [f"threads {config.threads}"]
    return _hashed(parts)


def _computed(raw: Mapping[str, Any]) -> str:
    """config.json without what says nothing of the computation."""
    return json.dumps({key: value for key, value in raw.items() if key not in INCIDENTAL}, sort_keys=True, default=str)


def _hashed(parts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def accelerator_name() -> list[str]:
    """What decides which kernels run there."""
    if not torch.cuda.is_available():
        return ["no GPU"]
    major, minor = torch.cuda.get_device_capability()
    return [torch.cuda.get_device_name(), f"sm {major}.{minor}", f"cuda {torch.version.cuda}"]
