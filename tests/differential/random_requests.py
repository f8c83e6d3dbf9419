"""Random requests: a tree of prompts that begin alike, and what is asked for with them. All from one seed."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from random import Random

from lab import BLOCK_SIZE, Delivered, Lab
from tokenizers import Tokenizer

from octavo.worker.messages import Branch, Request, SamplingParams
from octavo.worker.routing_hash import pack_hashes

MAX_PROMPT = 200
NUM_PROMPTS = 20
FREQUENT = (",", ".", "Ġthe", "Ġof", "Ġand", "Ġto", "Ċ", "Ġa")
"""Tokens that outputs often have, so that those that stop at one do stop."""

_TEXTS = Path(__file__).parent.parent / "data" / "prompts.json"

Tokens = tuple[int, ...]


class Text:
    """The words that prompts are made of, and the ids of frequent tokens."""

    def __init__(self, lab: Lab) -> None:
        tokenizer = Tokenizer.from_file(str(lab.model_dir / "tokenizer.json"))
        texts = json.loads(_TEXTS.read_text())["prompts"]
        self.token_ids: Tokens = tuple(tokenizer.encode("\n".join(texts)).ids)
        vocabulary = tokenizer.get_vocab()
        self.frequent: Tokens = tuple(vocabulary[token] for token in FREQUENT)

    def slice(self, rng: Random, length: int) -> Tokens:
        begin = rng.randrange(len(self.token_ids) - length)
        return self.token_ids[begin : begin + length]


def prompt_tree(rng: Random, text: Text) -> list[Tokens]:
    """Prompts of 1 to ``MAX_PROMPT`` tokens. Some are roots; the others go on after one of those before them.

    Many are of whole blocks exactly, or of one token more or less.
    """
    prompts: list[Tokens] = []
    while len(prompts) < NUM_PROMPTS:
        begin = rng.choice(prompts) if len(prompts) >= NUM_PROMPTS // 8 else ()
        to_edge = -len(begin) % BLOCK_SIZE + rng.choice([0, 1, 2]) * BLOCK_SIZE
        more = rng.choice([1, 2, to_edge - 1, to_edge, to_edge, to_edge + 1, rng.randint(1, 60)])
        prompt = (begin + text.slice(rng, max(more, 1)))[:MAX_PROMPT]
        if prompt not in prompts:
            prompts.append(prompt)
    return prompts


class RandomRequests:
    """``beams``: some are beam searches."""

    def __init__(self, rng: Random, text: Text, lab: Lab, *, beams: bool) -> None:
        self._rng = rng
        self._text = text
        self._hasher = lab.hasher
        self._beams = beams
        self._prompts = prompt_tree(rng, text)
        self._latest = self._prompts[0]
        self._numbers = count()

    def next(self) -> Request:
        rng = self._rng
        self._latest = rng.choice(self._candidates())
        beam_width = rng.randint(2, 4) if self._beams and rng.random() < 0.15 else None
        num_branches = rng.randint(1, beam_width) if beam_width else rng.choice([1, 1, 1, 1, 2, 3, 4])
        salt = rng.choice([None] * 5 + ["one", "two"])
        return Request(
            request_id=str(next(self._numbers)),
            gateway_id="gateway",
            model="model",
            prompt_token_ids=self._latest,
            routing_hashes=pack_hashes(self._hasher.hash_blocks(self._latest, salt)),
            sampling=self._sampling(beam_width),
            branches=tuple(Branch(index) for index in range(num_branches)),
            priority=rng.choice([0, 0, 0, 0, -1, 1]),
            cache_salt=salt,
            tenant=rng.choice(["one", "two", None]),
            use_prefix_cache=rng.random() < 0.85,
            expected_cached_tokens=rng.choice([0, 0, len(self._latest) - 1]),
        )

    def _candidates(self) -> list[Tokens]:
        """What comes after the latest prompt: often the same, or one that begins alike, while it is being computed."""
        dice, begin = self._rng.random(), self._latest[:BLOCK_SIZE]
        if dice < 0.3:
            return [self._latest]
        return self._prompts if dice < 0.6 else [prompt for prompt in self._prompts if prompt[:BLOCK_SIZE] == begin]

    def _sampling(self, beam_width: int | None) -> SamplingParams:
        rng = self._rng
        max_tokens = rng.randint(1, 8) if rng.random() < 0.85 else rng.randint(9, 32)
        frequent = self._text.frequent
        return SamplingParams(
            max_tokens=min(max_tokens, 8) if beam_width else max_tokens,
            seed=rng.choice([0, 1, rng.getrandbits(64)]),
            temperature=rng.choice([0.0, 0.0, 0.0, 0.6, 1.0, 1.5]),
            top_p=rng.choice([1.0, 1.0, 0.9, 0.5]),
            top_k=rng.choice([None, None, 1, 5, 50]),
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.4 else 0,
            stop_token_ids=tuple(rng.sample(frequent, rng.randint(1, 4))) if rng.random() < 0.4 else (),
            beam_width=beam_width,
            length_penalty=rng.choice([1.0, 1.0, 0.0, 2.0]),
            early_stopping=rng.random() < 0.3,
        )

    def goes_on(self, known: list[Delivered]) -> Request:
        """A request whose branches have had tokens elsewhere: some of those that ``known``, all of one, got here."""
        before, rng = known[0].request, self._rng
        branches = [Branch(each.branch, tuple(each.token_ids[: rng.randint(0, len(each.token_ids))])) for each in known]
        return Request(
            request_id=str(next(self._numbers)),
            gateway_id=before.gateway_id,
            model=before.model,
            prompt_token_ids=before.prompt_token_ids,
            routing_hashes=before.routing_hashes,
            sampling=before.sampling,
            branches=tuple(branches),
            priority=before.priority,
            cache_salt=before.cache_salt,
        )
