"""Keys of randomness. Standard library only, so that every process can name a stream; the vectorised noise is in noise.py.

One 64-bit seed per answer. The tagged streams of a seed never meet: a number drawn for one purpose says nothing about a number drawn
for another; mixing the shared stream with the p/q test, say, would bias the output. Seeds that differ in their last two bits alone share
streams crosswise, so a batch of answers wants random or mixed seeds, not 0, 1, 2, 3, where they must be independent of each other.
"""

MASK64 = (1 << 64) - 1

SHARED = 0  # coupled sampling: target and draft both read it
DRAFT = 1  # the draft's own draws under the standard method
ACCEPTANCE = 2  # uniform of the p/q test; id is 0
RESIDUAL = 3  # draws from the residual, and from p after a full block, under the standard method
ANSWERS = 4  # seeds of further answers to the same request


def mix64(x: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): a bijection of 64-bit ints."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def position_key(seed: int, tag: int, position: int) -> int:
    """Key of all noise for one decision. `position` = index of the token being decided; the prompt's first token is 0."""
    return mix64(mix64((seed ^ tag) & MASK64) ^ position)


def answer_seed(seed: int, index: int) -> int:
    """Seed of answer `index` of a request with several answers; answer 0 uses the request's seed. Requests with neighbouring seeds share
    no answer."""
    return seed if index == 0 else position_key(seed, ANSWERS, index)
