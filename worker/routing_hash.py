"""The routing hash: a 64-bit keyed hash of every prefix of a prompt that ends with a full block.

Gateway, router and KV events name blocks by it. It only steers: a collision costs a misplaced request and never a
wrong answer, because the prefix cache compares the tokens themselves. The key is one random secret of the application.

The hash is position-keyed and multilinear (Lemire and Kaser, "Strongly universal string hashing is fast", The Computer
Journal 57(11), 2014, the family MULTILINEAR). With x the token ids, K a random 64-bit key for each position, L one for
each block, and S a start value drawn by the salt, the prefix of b blocks of B tokens has the sum

    s(b) = S + sum of K[i] * x[i] over i < b * B + sum of L[j] over j < b      (mod 2^64)

and the hash mix(s(b)), where ``mix`` is a bijection that spreads the sum over all bits. L carries the block count, so
that a prefix continued by tokens 0 is another prefix.

Collision bound, over the choice of the key: two different prefixes of one length collide with probability 2^(v - 64),
where 2^v is the largest power of two that divides all differences of their ids. For ids below a vocabulary size V that
is less than V * 2^-64 (2^-46 for V = 2^18), for any int32 ids at most 2^-33. Prefixes of different lengths or salts
collide with probability 2^-64. A polynomial mod 2^64 has no such bound: Thue-Morse inputs collide for every base.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
_INITIAL_BLOCKS = 512
_CHUNK_TOKENS = 16_384
"""Tokens multiplied at once: their 64-bit products stay in the L2 cache."""

HASH_BYTES = 8
"""Of a hash in a message: hashes travel one after the other, as uint64, little endian."""

HashArray = npt.NDArray[np.uint64]
TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HashState:
    """The sum after ``num_tokens`` tokens, a multiple of the block size: all that the next block's hash needs."""

    total: int
    num_tokens: int


class RoutingHasher:
    """Hashes prompts, and continues them a block at a time. Not safe for use by two threads at once.

    ``key`` is the secret of the application, 16 bytes or more. ``block_size`` is in tokens; hashes of different block
    sizes have nothing in common.
    """

    def __init__(self, key: bytes, block_size: int) -> None:
        if len(key) < 16:
            raise ValueError(f"routing hash key has {len(key)} bytes; at least 16 are needed")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; at least 1 is needed")
        self.block_size = block_size
        self._secret = hashlib.blake2b(key, digest_size=32, person=b"octavo-route").digest()
        self._position_keys: HashArray = np.empty((0, block_size), np.uint64)
        self._block_keys: HashArray = np.empty(0, np.uint64)
        self._grow(_INITIAL_BLOCKS)

    def start(self, salt: str | None = None) -> HashState:
        """The state before the first token. Every salt, and no salt, gives hashes of its own."""
        name = b"none" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(name, digest_size=8, key=self._secret).digest()
        return HashState(int.from_bytes(digest, "little"), 0)

    def hash_blocks(self, token_ids: Sequence[int] | TokenArray, salt: str | None = None) -> HashArray:
        """uint64 [number of full blocks]: the hash of the prefix that each full block of ``token_ids`` ends.

        ``token_ids`` int32 [n] or a sequence of such integers; OverflowError if one does not fit.
        """
        return self.hash_prompt(token_ids, salt)[0]

    def hash_prompt(
        self, token_ids: Sequence[int] | TokenArray, salt: str | None = None
    ) -> tuple[HashArray, HashState]:
        """As ``hash_blocks``, and the state after the last full block, from which ``extend`` goes on."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        num_blocks = len(tokens) // self.block_size
        start = self.start(salt)
        if num_blocks == 0:
            return np.empty(0, np.uint64), start
        sums = self._block_sums(tokens[: num_blocks * self.block_size], num_blocks)
        sums[:1] += np.uint64(start.total)  # as an array: a scalar would warn when it wraps
        totals = np.cumsum(sums, dtype=np.uint64)
        return mix_array(totals), HashState(int(totals[-1]), num_blocks * self.block_size)

    def extend(self, state: HashState, block_tokens: Sequence[int] | TokenArray) -> tuple[HashState, int]:
        """The state and the hash after one more full block; equal to hashing the whole prefix again."""
        if len(block_tokens) != self.block_size:
            raise ValueError(f"extend takes a block of {self.block_size} tokens, got {len(block_tokens)}")
        block = state.num_tokens // self.block_size
        self._grow(block + 1)
        keys = self._position_keys[block].tolist()
        products = sum([key * int(token) for key, token in zip(keys, block_tokens, strict=True)])
        total = (state.total + int(self._block_keys[block]) + products) & MASK
        return HashState(total, state.num_tokens + self.block_size), mix(total)

    def _block_sums(self, tokens: TokenArray, num_blocks: int) -> HashArray:
        """uint64 [num_blocks]: what each block adds to the sum."""
        self._grow(num_blocks)
        blocks = tokens.reshape(num_blocks, self.block_size)
        sums = self._block_keys[:num_blocks].copy()
        step = max(1, _CHUNK_TOKENS // self.block_size)
        for first in range(0, num_blocks, step):
            chunk = slice(first, min(first + step, num_blocks))
            # Negative ids wrap to 2^64 - |id|, the same residue as in ``extend``.
            sums[chunk] += np.einsum("ij,ij->i", blocks[chunk].astype(np.uint64), self._position_keys[chunk])
        return sums

    def _grow(self, num_blocks: int) -> None:
        """Have keys for ``num_blocks`` blocks. SHAKE's output is a stream: a longer one begins with the shorter."""
        if num_blocks <= len(self._block_keys):
            return
        size = max(num_blocks, 2 * len(self._block_keys))
        self._position_keys = self._stream(b"positions", size * self.block_size).reshape(size, -1)
        self._block_keys = self._stream(b"blocks", size)

    def _stream(self, name: bytes, count: int) -> HashArray:
        data = hashlib.shake_256(self._secret + name).digest(8 * count)
        return np.frombuffer(data, dtype="<u8").astype(np.uint64)


def mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit numbers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def mix_array(values: HashArray) -> HashArray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def pack_hashes(hashes: Iterable[int] | HashArray) -> bytes:
    """Hashes as they travel. OverflowError if one does not fit into 64 bits."""
    array = np.asarray(hashes if isinstance(hashes, np.ndarray) else list(hashes), "<u8")
    return array.tobytes()


def unpack_hashes(packed: bytes) -> HashArray:
    """uint64 [number of hashes], read-only. ValueError for anything but whole hashes."""
    return np.frombuffer(whole_hashes(packed), "<u8")


def whole_hashes(packed: bytes) -> bytes:
    """What is given, if it is a number of whole hashes; else ValueError."""
    if not isinstance(packed, bytes):
        raise ValueError(f"routing hashes come as bytes, got {type(packed).__name__}")
    if len(packed) % HASH_BYTES:
        raise ValueError(f"routing hashes have {HASH_BYTES} bytes each, got {len(packed)} bytes")
    return packed
