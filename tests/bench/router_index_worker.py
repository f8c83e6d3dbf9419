"""One index of ``router_peers.py`` in a process of its own: Octavo's, ray's or Dynamo's. Imports only what it measures.

    python router_index_worker.py octavo|ray|dynamo ENTRIES GROUPS

Reads a JSON array on each line of standard input, a method of ``Bench`` with its arguments, and answers with its
figures as a JSON object. CPU times are those of the whole process: Dynamo's tree works in a thread of its own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from router_content import BLOCK_SIZE, Content, Holding, TokenArray, text_of

Figures = dict[str, float]
NUM_FRESH, FRESH_TOKENS = 100, 8192
KEY = bytes(range(32))


class Index(Protocol):
    """What is fed in is made beforehand: ``prompt`` and ``event`` are not timed, ``lookup`` and ``apply`` are."""

    def __init__(self, num_groups: int) -> None: ...
    def prompt(self, tokens: TokenArray) -> Any: ...
    def stored(self, group: int, prompt: Any) -> Any: ...
    def removed(self, group: int, prompt: Any) -> Any: ...
    def apply(self, change: Any) -> None: ...
    def lookup(self, prompt: Any) -> int:
        """The depth in blocks to which some group holds it."""

    def remove_group(self, group: int) -> None: ...
    def sweep(self) -> None: ...
    def hashing(self, tokens: TokenArray) -> dict[str, Callable[[], object]]: ...


class OctavoIndex:
    """Fed with packed routing hashes, as reports and queries carry them."""

    def __init__(self, num_groups: int) -> None:
        from octavo.router.index import PrefixIndex
        from octavo.worker.routing_hash import RoutingHasher, pack_hashes, unpack_hashes

        self._pack, self._unpack = pack_hashes, unpack_hashes
        self._hasher = RoutingHasher(KEY, BLOCK_SIZE)
        self._index = PrefixIndex(1 << 40)
        self._slots = [self._index.add_slot() for _ in range(num_groups)]

    def prompt(self, tokens: TokenArray) -> Any:
        return self._unpack(self._pack(self._hasher.hash_blocks(tokens)))

    def stored(self, group: int, prompt: Any) -> Any:
        return self._index.stored, self._slots[group], prompt

    def removed(self, group: int, prompt: Any) -> Any:
        return self._index.removed, self._slots[group], prompt

    def apply(self, change: Any) -> None:
        method, slot, prompt = change
        method(slot, prompt)

    def lookup(self, prompt: Any) -> int:
        steps = self._index.match(prompt)
        return steps[0][0] if steps else 0

    def remove_group(self, group: int) -> None:
        self._index.remove_slot(self._slots[group])

    def sweep(self) -> None:
        while not self._index.sweep(4096):
            pass

    def hashing(self, tokens: TokenArray) -> dict[str, Callable[[], object]]:
        return {"int32 array": lambda: self._hasher.hash_blocks(tokens)}


class RayIndex:
    """Fed with text, a character a token; it cannot be told that a block is gone."""

    def __init__(self, num_groups: int) -> None:
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        self._tree = PrefixTree()
        self._tenants = [f"group-{number}" for number in range(num_groups)]
        self._tree.add_tenants(self._tenants, 0.0)
        self._time_s = 0.0

    def prompt(self, tokens: TokenArray) -> Any:
        return text_of(tokens)

    def stored(self, group: int, prompt: Any) -> Any:
        self._time_s += 1
        return prompt, self._tenants[group], self._time_s

    def removed(self, group: int, prompt: Any) -> Any:
        return None

    def apply(self, change: Any) -> None:
        self._tree.insert(*change)

    def lookup(self, prompt: Any) -> int:
        matched, _ = self._tree.prefix_match(prompt, self._tenants)
        return len(matched) // BLOCK_SIZE

    def remove_group(self, group: int) -> None:
        self._tree.remove_tenants([self._tenants[group]])

    def sweep(self) -> None:
        """Nothing is left to do."""

    def hashing(self, tokens: TokenArray) -> dict[str, Callable[[], object]]:
        return {}


class DynamoIndex:
    """Fed with its events as JSON and lists of its block hashes, which also stand for the engine's own."""

    def __init__(self, num_groups: int) -> None:
        from dynamo.llm import RadixTree, compute_block_hash_for_seq

        self._hash = compute_block_hash_for_seq
        self._tree = RadixTree()
        self._event_id = 0

    def prompt(self, tokens: TokenArray) -> Any:
        return self._hash(tokens.tolist(), BLOCK_SIZE)

    def stored(self, group: int, prompt: Any) -> Any:
        blocks = [{"block_hash": value, "tokens_hash": value} for value in prompt]
        return group, self._event({"stored": {"parent_hash": None, "blocks": blocks}})

    def removed(self, group: int, prompt: Any) -> Any:
        """The tail goes before the head, as engines evict."""
        return group, self._event({"removed": {"block_hashes": prompt[::-1]}})

    def apply(self, change: Any) -> None:
        self._tree.apply_event(*change)

    def lookup(self, prompt: Any) -> int:
        return max(self._tree.find_matches(prompt).scores.values(), default=0)

    def remove_group(self, group: int) -> None:
        self._tree.remove_worker(group)
        self._tree.find_matches([])  # changes are done in another thread: one after the other

    def sweep(self) -> None:
        """Nothing is left to do."""

    def hashing(self, tokens: TokenArray) -> dict[str, Callable[[], object]]:
        listed = tokens.tolist()
        return {"list": lambda: self._hash(listed, BLOCK_SIZE), "int32 array": lambda: self._hash(tokens, BLOCK_SIZE)}

    def _event(self, data: dict[str, Any]) -> bytes:
        self._event_id += 1
        return json.dumps({"event_id": self._event_id, "data": data, "dp_rank": 0}).encode()


INDEXES: dict[str, type[Index]] = {"octavo": OctavoIndex, "ray": RayIndex, "dynamo": DynamoIndex}


class Bench:
    """Figures of one index. Times in seconds."""

    def __init__(self, name: str, num_entries: int, num_groups: int) -> None:
        self._content = Content(num_entries, num_groups)
        self._index = INDEXES[name](num_groups)
        self._num_groups = num_groups

    def fill(self) -> Figures:
        """All content, a holding at a time: bytes that the process grows by."""
        prompts: list[Any] = [self._index.prompt(tokens) for tokens in self._content.prompts]
        before = resident_bytes()
        for holding in self._content.holdings:
            self._index.apply(self._stored(holding, prompts[holding.prompt]))
        self._index.lookup(prompts[0])  # whatever works on its own has caught up
        return {"bytes an entry": (resident_bytes() - before) / self._content.num_entries}

    def lookups(self, length: int, count: int, seed: int) -> Figures:
        queries = self._content.held_out(length, count, seed)
        prompts = [self._index.prompt(query.tokens) for query in queries]
        found: list[int] = []
        took = timed(found.extend, map(self._index.lookup, prompts))
        expected = [query.num_shared_blocks for query in queries]
        if found != expected:
            raise AssertionError(f"found {found[:10]} …, held are {expected[:10]} …")
        return {name: seconds / count for name, seconds in took.items()}

    def hashing(self, length: int, count: int) -> Figures:
        """From what → CPU seconds of one prompt."""
        queries = self._content.held_out(length, count, 0)
        runs = [self._index.hashing(query.tokens) for query in queries]
        return {name: timed(call, [run[name] for run in runs])["cpu_s"] / count for name in runs[0]}

    def changes(self, seed: int) -> Figures:
        """Blocks per second of CPU into the full index, where one and where two groups have them, and out again."""
        fresh = fresh_prompts(self._content, seed)
        prompts = [self._index.prompt(query) for query in fresh]
        count = sum([len(tokens) // BLOCK_SIZE for tokens in fresh])
        figures: Figures = {}
        for name, make, group in [
            ("stored new", self._index.stored, 0),
            ("stored shared", self._index.stored, 1),
            ("removed shared", self._index.removed, 0),
            ("removed last", self._index.removed, 1),
        ]:
            changes = [make(group, prompt) for prompt in prompts]
            if changes[0] is not None:
                figures[f"{name} blocks/s"] = count / timed(self._apply, changes, prompts[0])["cpu_s"]
        return figures

    def remove_groups(self) -> Figures:
        """Mean seconds until a group's blocks are not found any more, and until their memory is free."""
        count = min(4, self._num_groups)
        gone = sum([timed(self._index.remove_group, group)["wall_s"] for group in range(count)])
        swept = timed(self._index.sweep)["wall_s"]
        return {"gone s": gone / count, "freed s": (gone + swept) / count}

    def _stored(self, holding: Holding, prompt: Any) -> Any:
        ratio = len(prompt) * BLOCK_SIZE // len(self._content.prompts[holding.prompt])  # of its units to blocks
        return self._index.stored(holding.group, prompt[: holding.num_blocks * ratio])

    def _apply(self, changes: Iterable[Any], prompt: Any) -> None:
        for change in changes:
            self._index.apply(change)
        self._index.lookup(prompt)  # whatever works on its own has caught up


def fresh_prompts(content: Content, seed: int) -> list[TokenArray]:
    """Prompts of which nothing is stored: what held-out ones have of their own."""
    queries = content.held_out(FRESH_TOKENS, NUM_FRESH, seed)
    return [query.tokens[query.num_shared_blocks * BLOCK_SIZE :] for query in queries]


def call(functions: Iterable[Callable[[], object]]) -> None:
    for function in functions:
        function()


def timed(run: Callable[..., object], *args: Any) -> Figures:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    run(*args)
    return {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}


def resident_bytes() -> int:
    """After what is free has been given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    bench = Bench(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints
    print(json.dumps({"python": platform.python_version()}), file=answers, flush=True)
    for line in sys.stdin:
        method, *args = json.loads(line)
        print(json.dumps(getattr(bench, method)(*args)), file=answers, flush=True)


if __name__ == "__main__":
    main()
