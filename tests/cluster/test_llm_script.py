"""``octavo.LLM`` in a script, with the embedded model."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from octavo import LLM

llm = LLM(device="cpu", max_model_len=512, kv_cache_memory_bytes="64MiB")
chat = [{"role": "user", "content": "What is the capital of France?"}]
(answer,) = llm.chat(chat, temperature=0, max_tokens=12)
print(answer.outputs[0].message.content)
(answer,) = llm.generate("A colour:", structured_outputs={"choice": ["red", "green"]})
print(answer.outputs[0].text in ("red", "green"))
print({"ray", "uvicorn"} & set(sys.modules))
"""


def test_a_script_with_the_embedded_model_loads_neither_ray_nor_a_server_and_ends() -> None:
    """Though it closes nothing."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["The capital of France is Paris.", "True", "set()"]
    assert done.stderr == ""
