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

from collections.abc import Callable, Sequence
from weakref import ref

from specdec.hashing import PrefixHash
from specdec.terms import DraftDistribution, Proposal

MAX_NODES = 512  # bound of one session's tree
HISTORY = 64  # committed positions a proposal may lag behind


def _nobody() -> None:
    """Parent of the root."""


class _Node:
    """`state` = the hash of the prefix that ends here, once somebody asked: most nodes are used or forgotten before. `parent` does not hold
    it: a branch that is dropped is gone at once, and leaves the garbage collector nothing to search for."""

    __slots__ = ("__weakref__", "children", "confidence", "distribution", "parent", "state", "token", "value")

    def __init__(
        self, token: int, distribution: DraftDistribution | None, confidence: float, parent: Callable[[], _Node | None] = _nobody
    ) -> None:
        self.token, self.distribution, self.confidence, self.parent = token, distribution, confidence, parent
        self.children: dict[int, _Node] = {}
        self.state: PrefixHash | None = None
        self.value = 0  # of the state

    def hash(self) -> int:
        if self.state is None:
            below, above = [self.token], self.parent()
            while above is not None and above.state is None:
                below.append(above.token)
                above = above.parent()
            assert above is not None and above.state is not None  # the root has one
            below.reverse()
            self.state = above.state.copy().extend(below)
            self.value = self.state.value
        return self.value


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
        for token in self._recent:
            value = walk.step(token)
            self._history[walk.length] = value
        self.length, self.hash = walk.length, walk.value  # of the committed tokens: how many, and their hash
        self._root = self._rooted(None, walk)
        self._newest: _Node | None = None
        self._most = 0  # nodes, at most: counted anew only where the bound is near

    @property
    def any(self) -> bool:
        """Whether something continues the committed tokens."""
        return bool(self._root.children)

    @property
    def nodes(self) -> int:
        """Tokens that continue the committed ones, on all branches."""
        found, pending = -1, [self._root]
        while pending:
            found += 1
            pending.extend(pending.pop().children.values())
        return found

    def hash_at(self, length: int) -> int | None:
        """Hash of the first `length` committed tokens, None when that is further back than HISTORY."""
        return self._history.get(length)

    def add(self, proposal: Proposal) -> int:
        """Joins a proposal. Returns how many of its tokens are new and usable; 0 = stale, repeated or over the bound."""
        tokens, skip = proposal.tokens, 0
        node = self._find(proposal.prefix_length - self.length, proposal.prefix_hash)
        if node is None:
            behind = self.length - proposal.prefix_length
            if behind <= 0 or self._history.get(proposal.prefix_length) != proposal.prefix_hash:
                return 0
            if tokens[:behind] != tuple(self._recent[-behind:]) or len(tokens) <= behind:
                return 0
            node, skip = self._root, behind
        added, distributions, confidences = 0, proposal.distributions, proposal.confidences
        drawn, sure = len(distributions), len(confidences)
        for i in range(skip, len(tokens)):
            token = tokens[i]
            child = node.children.get(token)
            if child is None:
                child = self._grow(node, token, distributions[i] if i < drawn else None, confidences[i] if i < sure else 0.0)
                if child is None:
                    break
                self._newest = child
                added += 1
            node = child
        return added

    def _find(self, depth: int, hash_: int) -> _Node | None:
        """The node so far below the root whose prefix has this hash."""
        if depth <= 0:
            return self._root if depth == 0 and self.hash == hash_ else None
        level = [self._root]
        for _ in range(depth):
            level = [child for node in level for child in node.children.values()]
            if not level:  # a peer may name any depth
                return None
        return next((node for node in level if node.hash() == hash_), None)

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
        if self._most >= MAX_NODES:
            self._most = self.nodes
            if self._most >= MAX_NODES:
                return None
        child = node.children[token] = _Node(token, distribution, confidence, ref(node))
        self._most += 1
        return child

    def block(self, num_tokens: int) -> Block:
        """The first-arrived chain below the root, at most `num_tokens` long; EMPTY on a miss."""
        nodes: list[_Node] = []
        node = self._root
        for _ in range(num_tokens):
            first = next(iter(node.children.values()), None)
            if first is None:
                break
            nodes.append(first)
            node = first
        return _chain(nodes) if nodes else EMPTY

    def newest(self) -> Block:
        """The chain from the root to the token that joined last; EMPTY when that is behind the root by now."""
        nodes: list[_Node] = []
        node = self._newest
        while node is not None and node is not self._root:
            nodes.append(node)
            node = node.parent()
        if node is None or not nodes:
            return EMPTY
        nodes.reverse()
        return _chain(nodes)

    def commit(self, tokens: Sequence[int]) -> None:
        """Moves the root past newly committed tokens."""
        node: _Node | None = self._root
        walk, history = self._root.state, self._history
        assert walk is not None  # it moves on with the root: nobody asks for the old one's any more
        for token in tokens:
            node = node.children.get(token) if node is not None else None
            self.hash = walk.step(token)
            history[walk.length] = self.hash
        self.length = walk.length
        self._recent += tokens
        del self._recent[:-HISTORY]
        while len(history) > len(self._recent) + 1:  # its oldest are its first
            del history[next(iter(history))]
        self._root = self._rooted(node, walk)
        self._most = self._most if self._root.children else 0

    def _rooted(self, node: _Node | None, walk: PrefixHash) -> _Node:
        """The node, or a new one, as the root; `walk` = the committed tokens."""
        root = node if node is not None else _Node(-1, None, 0.0)
        root.parent, root.state, root.value = _nobody, walk, self.hash
        return root


def _chain(nodes: Sequence[_Node]) -> Block:
    return Block(
        tuple([node.token for node in nodes]),
        tuple([node.distribution for node in nodes]),
        confidences=tuple([node.confidence for node in nodes]),
    )


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            return count
        count += 1
    return count
