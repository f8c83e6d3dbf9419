"""Beam search: KV blocks that beams share, and whether it finds what transformers finds.

    python tests/bench/beams.py [--prompts 10] [--width 4] [--prompt-tokens 200] [--output-tokens 64]
                                [--model FOLDER] [--dtype float32] [--threads N]

The prompts are the chats of ``tests/data/prompts.json``, one after the other, cut into pieces of equal length. They are
searched one at a time, by the engine and by ``generate(num_beams=width, early_stopping=False, length_penalty=1)``.

    saved    1 − Σ held blocks / Σ lengths of the beams' block tables, both over all steps that are planned with more
             than one beam
    equal    the best output has the same tokens
    excused  it has not, but by the model's own float32 log-probabilities (both outputs computed whole) their sums
             differ by less than 1e-3

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field

import torch
from in_process import PROMPTS, Bench, add_model_arguments, find_model, make_spec, run_to_end, show
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, __version__

from octavo.worker.engine import Engine
from octavo.worker.messages import Branch, Request, SamplingParams, SequenceUpdate
from octavo.worker.step_plan import StepPlan

LEAST_SAVED, NEAR_TIE = 0.5, 1e-3


@dataclass
class Search:
    outputs: list[list[int]] = field(default_factory=list)
    """Best first."""
    held_blocks: int = 0
    table_blocks: int = 0
    most_held_blocks: int = 0


@dataclass
class Verdict:
    num_equal: int = 0
    num_equal_below: int = 0
    """Of the second and later outputs."""
    num_excused: int = 0
    wrong: list[str] = field(default_factory=list)


def main() -> None:
    args = parse_args()
    model_dir = find_model(args)
    total = args.prompt_tokens + args.output_tokens
    spec = make_spec(
        model_dir,
        args.dtype,
        max_num_seqs=args.width,
        max_num_batched_tokens=2_048,
        max_model_len=total,
        num_blocks=args.width * (total // 16 + 2),
    )
    bench = Bench.load(spec, model_dir)
    prompts = make_prompts(PreTrainedTokenizerFast.from_pretrained(model_dir), args.prompts, args.prompt_tokens)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, args.dtype)).eval()
    stop_token_id = model.generation_config.eos_token_id
    ours = [search(bench, prompt, args, stop_token_id) for prompt in prompts]
    theirs = [search_with_transformers(model, prompt, args) for prompt in prompts]
    verdict = compare(model, prompts, ours, theirs)
    lengths = {name: getattr(args, name) for name in ("prompts", "width", "prompt_tokens", "output_tokens")}
    show(bench.conditions() | lengths | {"transformers": __version__}, report(ours, verdict, args))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=64)
    add_model_arguments(parser)
    return parser.parse_args()


def make_prompts(tokenizer: PreTrainedTokenizerFast, count: int, length: int) -> list[tuple[int, ...]]:
    texts = json.loads(PROMPTS.read_text())["prompts"]
    tokens: list[int] = []
    while len(tokens) < count * length:
        tokens += [token for text in texts for token in tokenizer.encode(text + "\n\n", add_special_tokens=False)]
    return [tuple(tokens[start : start + length]) for start in range(0, count * length, length)]


def search(bench: Bench, prompt: tuple[int, ...], args: argparse.Namespace, stop_token_id: int) -> Search:
    result = Search(outputs=[[] for _ in range(args.width)])

    def emit(gateway: str, update: SequenceUpdate) -> None:
        result.outputs[update.branch] += update.token_ids

    def observe(engine: Engine, plan: StepPlan) -> None:
        scheduler = engine.scheduler
        if scheduler.num_running > 1:
            held = scheduler.pool.num_held_blocks
            result.held_blocks += held
            result.most_held_blocks = max(result.most_held_blocks, held)
            result.table_blocks += sum(len(sequence.block_table) for sequence in scheduler.running)

    engine = bench.engine(emit, observe)
    sampling = SamplingParams(args.output_tokens, seed=0, stop_token_ids=(stop_token_id,), beam_width=args.width)
    branches = tuple(Branch(index) for index in range(args.width))
    engine.submit(Request("search", "bench", "bench", prompt, b"", sampling, branches))
    run_to_end(engine)
    engine.check()
    return result


@torch.inference_mode()
def search_with_transformers(
    model: torch.nn.Module, prompt: tuple[int, ...], args: argparse.Namespace
) -> list[list[int]]:
    tokens = torch.tensor([prompt])
    outputs = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=args.output_tokens,
        num_beams=args.width,
        num_return_sequences=args.width,
        early_stopping=False,
        length_penalty=1.0,
        do_sample=False,
    )
    stop_token_id = model.generation_config.eos_token_id
    return [_until(stop_token_id, output[len(prompt) :]) for output in outputs.tolist()]


def _until(stop_token_id: int, output: list[int]) -> list[int]:
    """Without the padding that follows the stop token."""
    return output[: output.index(stop_token_id) + 1] if stop_token_id in output else output


@torch.inference_mode()
def log_probability(model: torch.nn.Module, prompt: tuple[int, ...], output: list[int]) -> float:
    logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    taken = torch.log_softmax(logits.float(), dim=-1).gather(1, torch.tensor(output)[:, None])
    return float(taken.double().sum())


def compare(
    model: torch.nn.Module, prompts: list[tuple[int, ...]], ours: list[Search], theirs: list[list[list[int]]]
) -> Verdict:
    verdict = Verdict()
    for index, (prompt, found, expected) in enumerate(zip(prompts, ours, theirs, strict=True)):
        pairs = list(zip(found.outputs, expected, strict=True))
        verdict.num_equal_below += sum(mine == other for mine, other in pairs[1:])
        mine, other = pairs[0]
        if mine == other:
            verdict.num_equal += 1
            continue
        sums = log_probability(model, prompt, mine), log_probability(model, prompt, other)
        is_excused = abs(sums[0] - sums[1]) < NEAR_TIE
        verdict.num_excused += is_excused
        description = (
            f"prompt {index}: log-probability {sums[0]:.5f} of {len(mine)} tokens, "
            f"transformers {sums[1]:.5f} of {len(other)}"
        )
        print(description, "(excused)" if is_excused else "")
        if not is_excused:
            verdict.wrong.append(description)
    return verdict


def report(ours: list[Search], verdict: Verdict, args: argparse.Namespace) -> dict[str, object]:
    saved = 1 - sum(each.held_blocks for each in ours) / sum(each.table_blocks for each in ours)
    print(f"{saved:.1%} of the blocks of unshared tables are saved (wanted at least {LEAST_SAVED:.0%})")
    print(f"{verdict.num_equal} of {args.prompts} best outputs equal, {verdict.num_excused} excused by a near-tie")
    num_below = args.prompts * (args.width - 1)
    print(f"of the outputs below the best {verdict.num_equal_below} of {num_below} are equal")
    return {
        "saved": saved,
        "most_held_blocks": max(each.most_held_blocks for each in ours),
        "equal": verdict.num_equal,
        "excused": verdict.num_excused,
        "wrong": verdict.wrong,
        "equal_below_the_best": verdict.num_equal_below,
    }


if __name__ == "__main__":
    main()
