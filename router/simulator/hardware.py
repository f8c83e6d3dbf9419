"""Step times and memory of GPUs and models that people ask about, derived from public data sheets.

GPUs, of one device, dense BF16 without sparsity::

                              operations/s   bytes/s    bytes      source
    H100 SXM                  989.4e12       3.35e12     80e9      NVIDIA H100 Tensor Core GPU data sheet
    H200 SXM                  989.4e12       4.8e12     141e9      NVIDIA H200 Tensor Core GPU data sheet
    NVLink, each direction                   450e9                 both (900 GB/s in all)

Models, in BF16 (config.json and weights of the Hugging Face repositories)::

                    all weights      embedding        layers  hidden  heads  KV heads  head_dim
    Llama-3.1-8B    8,030,261,248    525,336,576      32      4,096   32     8         128
    Llama-3.1-70B   70,553,706,496   1,050,673,152    80      8,192   64     8         128

The embedding is looked up, not multiplied; the head of the same size is counted with every token, although prompts need
it once (7 % too much with 8B, 1.5 % with 70B).

What is assumed, since no data sheet says it: kernels reach 60 % of the arithmetic and 80 % of the bandwidth; a step
costs 1 ms beside its kernels; an all-reduce has 10 µs of latency, two for each layer (Megatron-LM, Shoeybi et al.,
2019), and moves 2 * (n - 1) / n of its bytes in each direction. 10 % of memory and 2 GB more are not for weights or KV.
"""

from __future__ import annotations

from dataclasses import dataclass

from .step_times import StepTimes

COMPUTE_SHARE, BANDWIDTH_SHARE = 0.6, 0.8
STEP_OVERHEAD_S = 0.001
ALL_REDUCE_LATENCY_S = 10e-6
LINK_BYTES_PER_S = 450e9
MEMORY_SHARE, RESERVED_BYTES = 0.9, 2e9
_BYTES = 2
"""Of a number in BF16."""


@dataclass(frozen=True, slots=True)
class Gpu:
    operations_per_s: float
    bytes_per_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Model:
    num_weights: int
    num_embedding_weights: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers: 131,072 for Llama-3.1-8B, 327,680 for 70B."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _BYTES


@dataclass(frozen=True, slots=True)
class Setup:
    """A worker group: a model on ``num_gpus`` GPUs, tensor-parallel."""

    gpu: Gpu
    model: Model
    num_gpus: int

    def step_times(self) -> StepTimes:
        """For instance Llama-3.1-8B on one H100: weights 15.0 GB / 2.68 TB/s = 5.6 ms, a token 15.0 GFLOP / 594 TFLOP/s
        = 25 µs, a token of KV 131 kB / 2.68 TB/s = 49 ns."""
        model, n = self.model, self.num_gpus
        operations_per_s = COMPUTE_SHARE * self.gpu.operations_per_s * n
        bytes_per_s = BANDWIDTH_SHARE * self.gpu.bytes_per_s * n
        num_multiplied = model.num_weights - model.num_embedding_weights
        num_reduces = 2 * model.num_layers if n > 1 else 0
        reduce_s = num_reduces * 2 * (n - 1) / n * model.hidden_size * _BYTES / LINK_BYTES_PER_S
        return StepTimes(
            overhead_s=STEP_OVERHEAD_S + num_reduces * ALL_REDUCE_LATENCY_S,
            weights_s=num_multiplied * _BYTES / bytes_per_s,
            token_s=2 * num_multiplied / operations_per_s + reduce_s,
            context_s=4 * model.num_layers * model.num_heads * model.head_dim / operations_per_s,
            kv_s=model.kv_bytes_per_token / bytes_per_s,
        )

    def num_kv_tokens(self) -> int:
        """What memory has room for beside the weights."""
        free = (MEMORY_SHARE * self.gpu.memory_bytes - RESERVED_BYTES) * self.num_gpus
        return int((free - self.model.num_weights * _BYTES) / self.model.kv_bytes_per_token)


H100 = Gpu(989.4e12, 3.35e12, 80e9)
H200 = Gpu(989.4e12, 4.8e12, 141e9)
LLAMA_8B = Model(8_030_261_248, 525_336_576, 32, 4_096, 32, 8, 128)
LLAMA_70B = Model(70_553_706_496, 1_050_673_152, 80, 8_192, 64, 8, 128)

SETUPS: dict[str, Setup] = {
    "h100-8b": Setup(H100, LLAMA_8B, 1),
    "h100-70b-tp4": Setup(H100, LLAMA_70B, 4),
    "h200-8b": Setup(H200, LLAMA_8B, 1),
    "h200-70b-tp2": Setup(H200, LLAMA_70B, 2),
}
"""Llama-3.1-8B and 70B, with the tensor parallelism that the name ends with."""
