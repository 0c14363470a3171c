"""Whole generations through `verify`, round by round, with drafts that are right, wrong or wrong in one place."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import torch

from specdec.acceptance import verify
from specdec.sampling import Sampler
from specdec.terms import RejectionMethod, SamplingParams

COUPLED, STANDARD = RejectionMethod.COUPLED, RejectionMethod.STANDARD
EOS = 2
PROMPT = [5, 6, 7]


def sampler(vocab_size=128, seed=3, eos=EOS, prompt=PROMPT, **params):
    return Sampler(SamplingParams(**params), seed, vocab_size, [eos], prompt)


class Model:
    """Next-token logits as a pure function of the tokens so far."""

    def __init__(self, vocab_size=128, spread=3.0, favourites=None):
        self.vocab_size, self.spread = vocab_size, spread
        self.favourites = favourites or {}  # output index -> id far above all others

    def row(self, text):
        key = int.from_bytes(hashlib.blake2b(struct.pack(f"<{len(text)}I", *text), digest_size=4).digest(), "little")
        row = np.random.default_rng(key).standard_normal(self.vocab_size) * self.spread
        favourite = self.favourites.get(len(text) - len(PROMPT))
        if favourite is not None:
            row[favourite] = 100.0
        return torch.from_numpy(row)

    def rows(self, output, block):
        text = [*PROMPT, *output]
        return torch.stack([self.row([*text, *block[:i]]) for i in range(len(block) + 1)])


def self_draft(model, s, output, k):
    block = []
    for _ in range(k):
        text = [*PROMPT, *output, *block]
        block.append(s.choose(model.row(text), len(text), [*output, *block]))
    return block


def anti_draft(model, s, output, k):
    block = []
    for _ in range(k):
        block.append(int(model.row([*PROMPT, *output, *block]).argmin()))
    return block


def wrong_at(slot):
    """Right up to `slot`, wrong there, right again behind it as if nothing had happened."""

    def draft(model, s, output, k):
        block = self_draft(model, s, output, k)
        if slot < k:
            block[slot] = (block[slot] + 1) % model.vocab_size
        return block

    return draft


def rounds(model, s, k, draft=self_draft, most_rounds=200):
    """(verdict, output before it) of each round until the generation ends or `most_rounds` passed."""
    output, done = [], []
    for _ in range(most_rounds):
        block = draft(model, s, output, k) if k else []
        verdict = verify(model.rows(output, block), block, (), s, output, COUPLED)
        done.append((verdict, list(output)))
        output += verdict.tokens
        if verdict.finish is not None:
            break
    return done, output


def end(done):
    verdict = done[-1][0]
    return verdict.finish, verdict.stop_token_id
