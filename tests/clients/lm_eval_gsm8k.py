"""lm-evaluation-harness against a server: generated answers and log-likelihoods of 20 GSM8K questions.

Runs in the environment of the clients: ``lm_eval_gsm8k.py URL MODEL completions|chat|loglikelihood``. The last line of
the output is a JSON object: the number of samples, and the metrics.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.task import ConfigurableTask

DATA = str(Path(__file__).parents[1] / "data" / "gsm8k_20.jsonl")
NUM_QUESTIONS = 20

COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": DATA}},
    "test_split": "test",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "num_fewshot": 0,
}
GENERATED = COMMON | {
    "task": "gsm8k_20",
    "output_type": "generate_until",
    "doc_to_target": "{{answer.split('####')[1].strip()}}",
    "generation_kwargs": {"until": ["Question:", "\n\n"], "max_gen_toks": 48, "do_sample": False, "temperature": 0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
CHOSEN = COMMON | {
    "task": "gsm8k_20_choice",
    "output_type": "multiple_choice",
    "doc_to_choice": ["{{' ' + answer.split('####')[0]}}", " I do not know."],
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def main() -> None:
    url, model, kind = sys.argv[1:]
    task, path = {
        "completions": (GENERATED, "completions"),
        "chat": (GENERATED, "chat/completions"),
        "loglikelihood": (CHOSEN, "completions"),
    }[kind]
    results = lm_eval.simple_evaluate(
        model="local-chat-completions" if kind == "chat" else "local-completions",
        model_args={"model": model, "base_url": f"{url}/v1/{path}", "num_concurrent": 4, "max_retries": 1},
        tasks=[ConfigurableTask(config=task)],
        apply_chat_template=kind == "chat",
        bootstrap_iters=0,
    )
    (samples,) = results["samples"].values()
    (metrics,) = results["results"].values()
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    outputs = [sample["resps"] for sample in samples]
    print(json.dumps({"num_samples": len(samples), "metrics": numbers, "outputs": outputs}))


if __name__ == "__main__":
    main()
