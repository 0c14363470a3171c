"""Samplers of small vocabularies, and parameters that reach every stage."""

from __future__ import annotations

import torch

from specdec.sampling import Sampler
from specdec.terms import SamplingParams

EOS = 2


def sampler(vocab_size=100, prompt=(5, 6, 7), seed=11, columns=None, **params):
    return Sampler(SamplingParams(**params), seed, vocab_size, [EOS], prompt, columns)


def choose(s, logits, output=()):
    return s.choose(torch.as_tensor(logits), s.prompt_length + len(output), list(output))


def scores(s, logits, output=()):
    return s.scores(torch.as_tensor(logits), s.prompt_length + len(output), list(output)).numpy()


PARAMS = [
    {},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300, "temperature": 1.7},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 0.3},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 0.9},
    {"top_k": 2, "top_p": 0.5},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"repetition_penalty": 1.3, "top_p": 0.9},
    {"repetition_penalty": 0.7, "frequency_penalty": 2.0, "min_tokens": 40, "stop_token_ids": (9, 10)},
    {"logit_bias": {3: 4.5, 8: -100.0, 11: 0.1}, "banned_token_ids": (0, 1, 4)},
    {"allowed_token_ids": (1, 2, 8, 30, 31), "logit_bias": {8: 3.0}, "banned_token_ids": (30,), "top_k": 3},
]
