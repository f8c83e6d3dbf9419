"""What rounding weights and KV changes: each form of the model against the unrounded one, in this process.

    python tests/bench/accuracy.py [--forms int8,kv-int8,kv-fp8_e4m3,int8+kv-int8] [--questions FILE] [--texts FILE]
                                   [--limit N] [--max-tokens 64] [--model FOLDER] [--dtype float32] [--threads N]

A form is a ``--quantization``, a ``--kv-cache-dtype`` after ``kv-``, or both with a plus between. Questions are asked
through the chat template and answered greedily; default: MT-bench questions. Texts are read, not continued; default:
the same questions. Files are JSON lines, or gzip of it, with the text in ``question`` (GSM8K) or first in ``turns``
(MT-bench).

    equal outputs    share of answers that are the same to the end
    common prefix    mean tokens before the first difference, of ``--max-tokens`` or the end
    equal tokens     share of the tokens of the unrounded model's answers that the form would have chosen in their place
                     given what the unrounded model wrote before them: one difference does not bring others with it
    perplexity       of the texts, each alone, without its first token; ratio: to the unrounded model's
    KV bytes         of a block, over those of the unrounded form

The last line is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from in_process import PROMPTS, Bench, add_model_arguments, find_model, make_spec, run_to_end, show
from teacher_forcing import common_prefix, logits_of
from transformers import PreTrainedTokenizerFast

from octavo.worker.messages import Request, SamplingParams, SequenceUpdate
from octavo.worker.model_runner import ModelRunner
from octavo.worker.spec import KvCacheDtype, Quantization, WorkerSpec

UNROUNDED = "unrounded"
BUDGET, MAX_NUM_SEQS, NUM_BLOCKS = 1_024, 16, 2_048
MOST_PERPLEXITY_RATIO, MOST_KV_RATIO = 1.02, 0.27

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Tasks:
    """``texts`` and ``questions`` in tokens."""

    questions: list[Tokens]
    texts: list[Tokens]
    max_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """Of one form."""

    outputs: list[Tokens]
    next_tokens: list[Tokens]
    """What the form chooses after each part of the unrounded model's answers."""
    perplexity: float
    kv_bytes_per_block: int


def main() -> None:
    args = parse_args()
    model_dir = find_model(args)
    tasks = read_tasks(args, PreTrainedTokenizerFast.from_pretrained(model_dir))
    spec = make_spec(
        model_dir,
        args.dtype,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
        max_model_len=BUDGET + args.max_tokens,
        num_blocks=NUM_BLOCKS,
    )
    bench = Bench.load(spec, model_dir)
    conditions = bench.conditions() | {
        "questions": len(tasks.questions),
        "texts": len(tasks.texts),
        "text_tokens": sum(map(len, tasks.texts)),
        "max_tokens": tasks.max_tokens,
    }
    expected = run(bench, tasks, None)
    print(f"{UNROUNDED}: perplexity {expected.perplexity:.4f}", flush=True)
    figures: dict[str, object] = {UNROUNDED: {"perplexity": expected.perplexity}}
    for name in args.forms:
        bench = Bench.load(rounded(spec, name), model_dir)
        figures[name] = compare(name, run(bench, tasks, expected.outputs), expected)
    show(conditions, figures)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "int8,kv-int8,kv-fp8_e4m3,int8+kv-int8"
    parser.add_argument("--forms", type=forms, default=forms(default), help=f"default: {default}")
    parser.add_argument("--questions", type=Path, default=PROMPTS)
    parser.add_argument("--texts", type=Path, default=PROMPTS)
    parser.add_argument("--limit", type=int, help="use only the first of each file")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    add_model_arguments(parser)
    return parser.parse_args()


def forms(text: str) -> list[str]:
    known = {*get_args(Quantization), *(f"kv-{name}" for name in get_args(KvCacheDtype) if name != "auto")}
    names = text.split(",")
    for name in names:
        parts = name.split("+")
        if not known.issuperset(parts) or len({part.startswith("kv-") for part in parts}) < len(parts):
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(sorted(known))}, or one of each kind")
    return names


def rounded(spec: WorkerSpec, form: str) -> WorkerSpec:
    parts: dict[str, Any] = {}
    for part in form.split("+"):
        name = "kv_cache_dtype" if part.startswith("kv-") else "quantization"
        parts[name] = part.removeprefix("kv-")
    return replace(spec, **parts)


def read_tasks(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Tasks:
    """Cut to what one step can compute, and to texts of two tokens at least."""
    questions = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in read_texts(args.questions)[: args.limit]
    ]
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in read_texts(args.texts)[: args.limit]]
    return Tasks(
        [tuple(tokens[: BUDGET - args.max_tokens]) for tokens in questions],
        [tuple(tokens[:BUDGET]) for tokens in texts if len(tokens) > 1],
        args.max_tokens,
        (tokenizer.eos_token_id,),
    )


def read_texts(path: Path) -> list[str]:
    if path.suffix == ".json":
        return list(json.loads(path.read_text())["prompts"])
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = [json.loads(line) for line in raw.decode().splitlines() if line.strip()]
    return [row["question"] if "question" in row else row["turns"][0] for row in rows]


def run(bench: Bench, tasks: Tasks, expected: list[Tokens] | None) -> Outcome:
    """``expected``: the unrounded model's answers; None: they are this form's own."""
    outputs = answer(bench, tasks)
    bench.executor.shut_down()
    runner = bench.loaded.runner
    return Outcome(
        outputs,
        choose(runner, tasks.questions, outputs if expected is None else expected),
        perplexity(runner, tasks.texts),
        runner.kv_bytes_per_block,
    )


def answer(bench: Bench, tasks: Tasks) -> list[Tokens]:
    """Greedy, by the whole engine."""
    outputs: list[list[int]] = [[] for _ in tasks.questions]

    def emit(gateway: str, update: SequenceUpdate) -> None:
        outputs[int(update.request_id)] += update.token_ids

    engine = bench.engine(emit)
    sampling = SamplingParams(tasks.max_tokens, seed=0, temperature=0.0, stop_token_ids=tasks.stop_token_ids)
    for index, prompt in enumerate(tasks.questions):
        engine.submit(Request(str(index), "bench", "bench", prompt, b"", sampling))
    run_to_end(engine)
    return [tuple(output) for output in outputs]


def choose(runner: ModelRunner, questions: list[Tokens], outputs: list[Tokens]) -> list[Tokens]:
    """The most likely token in the place of each token of ``outputs``."""
    sequences = [(*question, *output) for question, output in zip(questions, outputs, strict=True)]
    return [
        tuple(logits[len(question) - 1 : -1].argmax(dim=-1).tolist())
        for question, logits in zip(questions, logits_of(runner, sequences), strict=True)
    ]


def perplexity(runner: ModelRunner, texts: list[Tokens]) -> float:
    """exp of the mean negative log-probability of all tokens but each text's first."""
    loss, num_tokens = 0.0, 0
    for tokens, logits in zip(texts, logits_of(runner, texts), strict=True):
        targets = torch.tensor(tokens[1:], device=logits.device)
        loss += float(torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="sum"))
        num_tokens += len(targets)
    return math.exp(loss / num_tokens)


def compare(name: str, found: Outcome, expected: Outcome) -> dict[str, float]:
    pairs = list(zip(found.outputs, expected.outputs, strict=True))
    chosen = [
        one == other
        for pair in zip(found.next_tokens, expected.outputs, strict=True)
        for one, other in zip(*pair, strict=True)
    ]
    figures = {
        "equal_outputs": sum(one == other for one, other in pairs) / len(pairs),
        "common_prefix_tokens": sum(common_prefix(*pair) for pair in pairs) / len(pairs),
        "equal_tokens": sum(chosen) / len(chosen),
        "perplexity": found.perplexity,
        "perplexity_ratio": found.perplexity / expected.perplexity,
        "kv_bytes_ratio": found.kv_bytes_per_block / expected.kv_bytes_per_block,
    }
    print(
        f"{name}: {figures['equal_outputs']:.0%} of the outputs equal, the same for "
        f"{figures['common_prefix_tokens']:.1f} tokens on average, {figures['equal_tokens']:.2%} of the next tokens "
        f"equal; perplexity {found.perplexity:.4f}, {figures['perplexity_ratio']:.4f} × (wanted at most "
        f"{MOST_PERPLEXITY_RATIO}); KV bytes {figures['kv_bytes_ratio']:.3f} ×"
        + (f" (wanted at most {MOST_KV_RATIO})" if "kv-" in name else ""),
        flush=True,
    )
    return figures


if __name__ == "__main__":
    main()
