"""The lookahead: a tree of proposals that continues the committed tokens. Pure; knows no session, draft or clock.

Rules
1. The root is the end of the committed tokens; every other node is one proposed token, reached by one exact prefix. A block from
   another source is among them while it is in flight, since the draft goes on behind it.
2. A proposal names the prefix it continues by length and hash. It joins where that prefix ends: at a node, at the root, or at a
   recent committed position, where its tokens must first repeat what was committed since. Anything else is stale and dropped:
   late, reordered or corrupt proposals cannot reach a target.
3. A commit descends the tree. What hangs below the new root stays usable; everything else is forgotten.
4. The first token to arrive at a node stays first: the standard method needs one chain per exact prefix (choosing among several
   by their tokens would bias the output).
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.hashing import PrefixHash
from specdec.terms import DraftDistribution, Proposal

MAX_NODES = 512  # bound of one session's tree
HISTORY = 64  # committed positions a proposal may lag behind


class _Node:
    __slots__ = ("children", "confidence", "distribution", "hash", "parent", "token")

    def __init__(
        self, token: int, hash_: PrefixHash, distribution: DraftDistribution | None, confidence: float, parent: _Node | None = None
    ) -> None:
        self.token, self.hash, self.distribution, self.confidence, self.parent = token, hash_, distribution, confidence, parent
        self.children: dict[int, _Node] = {}


class Block:
    """A chain to verify: tokens and, under the standard method, what each was drawn from. `source`: draft, ngram or forced; the draft knows
    its `own`. `confidences` = one per token of the draft's, empty for a block from elsewhere."""

    __slots__ = ("confidences", "distributions", "source", "tokens")

    def __init__(
        self,
        tokens: tuple[int, ...],
        distributions: tuple[DraftDistribution | None, ...],
        source: str = "draft",
        confidences: tuple[float, ...] = (),
    ) -> None:
        self.tokens, self.distributions, self.source, self.confidences = tokens, distributions, source, confidences

    @property
    def own(self) -> bool:
        """The draft proposed it."""
        return self.source == "draft"

    def head(self, num_tokens: int) -> Block:
        """Its first tokens."""
        n = num_tokens
        return self if n >= len(self.tokens) else Block(self.tokens[:n], self.distributions[:n], self.source, self.confidences[:n])

    def tail(self, start: int) -> Block:
        """What lies behind its first `start` tokens."""
        return Block(self.tokens[start:], self.distributions[start:], self.source, self.confidences[start:])

    def behind(self, decided: tuple[int, ...]) -> Block:
        """What is left of it when these tokens were decided; EMPTY when they differ from it."""
        n = len(decided)
        return self.tail(n) if self.tokens[:n] == decided else EMPTY


EMPTY = Block((), ())


class Lookahead:
    def __init__(self, committed: Sequence[int]) -> None:
        self._recent = list(committed[-HISTORY:])  # the newest committed tokens
        start = len(committed) - len(self._recent)
        walk = PrefixHash(committed[:start])
        self._history = {start: walk.value}  # committed length -> hash, for the newest HISTORY lengths
        for i, token in enumerate(self._recent):
            self._history[start + i + 1] = walk.extend((token,)).value
        self._root = _Node(-1, walk, None, 0.0)
        self._index = {(walk.length, walk.value): self._root}
        self._newest: _Node | None = None
        self.nodes = 0

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._root.hash.length

    @property
    def hash(self) -> int:
        """Their hash."""
        return self._root.hash.value

    @property
    def any(self) -> bool:
        """Whether something continues the committed tokens."""
        return bool(self._root.children)

    def hash_at(self, length: int) -> int | None:
        """Hash of the first `length` committed tokens, None when that is further back than HISTORY."""
        return self._history.get(length)

    def add(self, proposal: Proposal) -> int:
        """Joins a proposal. Returns how many of its tokens are new and usable; 0 = stale, repeated or over the bound."""
        tokens, skip = proposal.tokens, 0
        node = self._index.get((proposal.prefix_length, proposal.prefix_hash))
        if node is None:
            behind = self.length - proposal.prefix_length
            if behind <= 0 or self._history.get(proposal.prefix_length) != proposal.prefix_hash:
                return 0
            if tokens[:behind] != tuple(self._recent[-behind:]) or len(tokens) <= behind:
                return 0
            node, skip = self._root, behind
        added = 0
        for i in range(skip, len(tokens)):
            child = node.children.get(tokens[i])
            if child is None:
                distribution = proposal.distributions[i] if i < len(proposal.distributions) else None
                confidence = proposal.confidences[i] if i < len(proposal.confidences) else 0.0
                child = self._grow(node, tokens[i], distribution, confidence)
                if child is None:
                    break
                self._newest = child
                added += 1
            node = child
        return added

    def assume(self, block: Sequence[int]) -> None:
        """A block that the draft did not propose is in flight: what it proposes behind it has a place."""
        node = self._root
        for token in block:
            child = node.children.get(token) or self._grow(node, token, None, 0.0)
            if child is None:
                return
            node = child

    def _grow(self, node: _Node, token: int, distribution: DraftDistribution | None, confidence: float) -> _Node | None:
        """A new node below `node`; None when there are too many."""
        if self.nodes >= MAX_NODES:
            return None
        child = node.children[token] = _Node(token, node.hash.copy().extend((token,)), distribution, confidence, node)
        self._index[(child.hash.length, child.hash.value)] = child
        self.nodes += 1
        return child

    def block(self, num_tokens: int) -> Block:
        """The first-arrived chain below the root, at most `num_tokens` long; EMPTY on a miss."""
        nodes: list[_Node] = []
        node = self._root
        while len(nodes) < num_tokens and node.children:
            node = next(iter(node.children.values()))
            nodes.append(node)
        return _chain(nodes) if nodes else EMPTY

    def newest(self) -> Block:
        """The chain from the root to the token that joined last; EMPTY when that is behind the root by now."""
        nodes: list[_Node] = []
        node = self._newest
        while node is not None and node is not self._root:
            nodes.append(node)
            node = node.parent
        if node is None or not nodes:
            return EMPTY
        nodes.reverse()
        return _chain(nodes)

    def commit(self, tokens: Sequence[int]) -> None:
        """Moves the root past newly committed tokens."""
        node: _Node | None = self._root
        walk = self._root.hash
        for token in tokens:
            node = node.children.get(token) if node is not None else None
            walk = node.hash if node is not None else walk.copy().extend((token,))
            self._history[walk.length] = walk.value
        self._recent = [*self._recent, *tokens][-HISTORY:]
        for length in [n for n in self._history if n < walk.length - len(self._recent)]:
            del self._history[length]
        self._root = node if node is not None else _Node(-1, walk, None, 0.0)
        self._root.parent = None
        self._reindex()

    def _reindex(self) -> None:
        self._index = {}
        pending = [self._root]
        while pending:
            node = pending.pop()
            self._index[(node.hash.length, node.hash.value)] = node
            pending.extend(node.children.values())
        self.nodes = len(self._index) - 1


def _chain(nodes: Sequence[_Node]) -> Block:
    return Block(tuple(n.token for n in nodes), tuple(n.distribution for n in nodes), confidences=tuple(n.confidence for n in nodes))


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
