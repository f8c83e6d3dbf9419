"""DecodeGraphs: the forward pass of steps in which every sequence has one token, recorded once and played back.

Launching the kernels of such a step one by one takes a processor longer than a GPU takes to run them. A graph is
launched at once, but does the same work at the same addresses: its inputs lie in buffers of its own, and it serves a
number of rows and a length of context that are fixed when it is recorded (its ``GraphKey``). A step takes the smallest
graph that holds it. Rows that are left over are padding: slot -1, length 0, no query, so that kernels leave them early,
and what they give is not looked at.

Graphs are recorded while the engine serves: all ranks record the same one at the same place among the steps, since
collectives are recorded with it, and they agree on the outcome, since a rank that plays back what another one computes
by itself would exchange tensors of other shapes. What no graph holds is computed without.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .block_tables import BlockTables
from .host_copy import aligned, staging
from .model.batch import Batch
from .step_plan import GraphKey, StepPlan

SHORTEST_CONTEXT = 2048
CONTEXT_FACTOR = 8
"""Contexts are recorded in classes of 2,048 tokens, 16,384, 131,072, …: attention sizes its launch by the longest that
may come, and a short sequence should not pay for the splits of a long one; each class is a set of graphs more."""

MOST_ROWS = 512
"""Beyond, a step keeps a GPU so busy that launching its kernels takes no time of its own."""

BYTES_PER_GRAPH = 8 << 20
"""What the driver keeps for a graph of some hundred kernels, an estimate; tests/gpu prints what it is."""

Agree = Callable[[bool], bool]
"""Whether all ranks say yes. All must call it."""

logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """What records work on a device, and plays it back."""

    def has_room(self, num_bytes: int) -> bool:
        """Whether the device has so much memory left."""
        ...

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run it once as it will be recorded: compiles kernels and makes what libraries keep."""
        ...

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What plays back the work that ``run`` launches; ``run`` must not wait for the device."""
        ...


class CudaRecorder:
    """CUDA graphs (``torch.cuda.CUDAGraph``). All share one pool: only one is played back at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def has_room(self, num_bytes: int) -> bool:
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + cached >= num_bytes

    def warm_up(self, run: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        # "thread_local": other threads wait for events meanwhile, which the default mode forbids them.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Inputs:
    """int32 views of one buffer for a number of rows; see ``Batch``."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    slots: Tensor
    query_start_loc: Tensor

    @classmethod
    def of(cls, buffer: Tensor, num_rows: int) -> _Inputs:
        """``[5 × num_rows | num_rows + 1]``, each row beginning at a multiple of 16 bytes."""
        size = 5 * aligned(num_rows)
        token_ids, positions, slot_mapping, seq_lens, slots = buffer[:size].view(5, -1)[:, :num_rows].unbind()
        return cls(token_ids, positions, slot_mapping, seq_lens, slots, buffer[size : size + num_rows + 1])


def _num_inputs(num_rows: int) -> int:
    return 5 * aligned(num_rows) + num_rows + 1


class DecodeGraphs:
    """``forward`` gives a batch's logits ``[T, vocabulary]``, on rank 0 and None on the others."""

    def __init__(
        self,
        forward: Callable[[Batch], Tensor | None],
        tables: BlockTables,
        recorder: Recorder,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.sizes = graph_sizes(max_num_seqs)
        self.contexts = context_classes(max_model_len)
        self._forward = forward
        self._tables = tables
        self._recorder = recorder
        self._device = device
        self._buffer = torch.zeros(_num_inputs(self.sizes[-1]), dtype=torch.int32, device=device)
        self._sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._logits: Tensor | None = None
        self._starts = np.arange(self.sizes[-1] + 1, dtype=np.int32)
        self._graphs: dict[GraphKey, Callable[[], None]] = {}
        self._missed: GraphKey | None = None
        self._is_over = False
        self.room_bytes = BYTES_PER_GRAPH
        """Memory that must be left for another graph."""

    @property
    def buffer_bytes(self) -> int:
        """Memory of the inputs and outputs that are there so far."""
        logits = 0 if self._logits is None else self._logits.nbytes
        return self._buffer.nbytes + self._sampled.nbytes + logits

    # ---- which graph ----

    def holds(self, key: GraphKey) -> bool:
        """Whether it is recorded."""
        return key in self._graphs

    def find(self, plan: StepPlan) -> GraphKey | None:
        """The recorded graph that ``plan`` can be played back with; the smallest one that holds it."""
        num_seqs = plan.slots.size
        if plan.token_ids.size != num_seqs or not 0 < num_seqs <= self.sizes[-1]:
            return None
        best = self._key(num_seqs, int(plan.num_computed_tokens.max()) + 1)
        if best in self._graphs:
            return best
        self._missed = best
        # A larger one computes some rows for nothing, which costs less than launching every kernel.
        fitting = [key for key in self._graphs if key.num_rows >= num_seqs and key.max_seq_len >= best.max_seq_len]
        return min(fitting, default=None)

    def _key(self, num_seqs: int, seq_len: int) -> GraphKey:
        num_rows = next(size for size in self.sizes if size >= num_seqs)
        return GraphKey(num_rows, next(context for context in self.contexts if context >= seq_len))

    def next_key(self, *, idle: bool) -> GraphKey | None:
        """The graph to record next: the one that a step has missed last; when there is time also those of short
        contexts, largest first, because the others then fit into its memory."""
        if self._is_over:
            return None
        if self._missed is not None and self._missed not in self._graphs:
            return self._missed
        usual = (GraphKey(size, self.contexts[0]) for size in reversed(self.sizes))
        return next((key for key in usual if key not in self._graphs), None) if idle else None

    # ---- recording ----

    def record(self, key: GraphKey, agree: Agree) -> None:
        """Record a graph, on all ranks at once. When one of them cannot, none has it, and no other is recorded.

        Raises what running the forward pass raises: ranks that fail there are lost, as in any step.
        """
        started = time.monotonic()
        if not agree(self._recorder.has_room(self.room_bytes)):
            self._give_up(key, "memory is short")
            return
        self.run_padding(key)
        replay = self._try_to_record(key)
        if not agree(replay is not None) or replay is None:
            self._give_up(key, "a rank could not record it")
            return
        self._graphs[key] = replay
        took_s = time.monotonic() - started
        logger.info("graph of %d rows, %d tokens: recorded in %.2f s", key.num_rows, key.max_seq_len, took_s)

    @torch.inference_mode()
    def run_padding(self, key: GraphKey | None = None) -> None:
        """Compute a step of padding alone, which changes nothing; by default of the largest graph."""
        key = key or GraphKey(self.sizes[-1], self.contexts[-1])
        self._buffer.zero_()
        _Inputs.of(self._buffer, key.num_rows).slot_mapping.fill_(-1)
        self._recorder.warm_up(lambda: self._run(key))

    def _try_to_record(self, key: GraphKey) -> Callable[[], None] | None:
        try:
            return self._recorder.record(lambda: self._run(key))
        except RuntimeError:  # of CUDA, out of memory too
            logger.exception("a graph of %d rows could not be recorded", key.num_rows)
            return None

    def _give_up(self, key: GraphKey, why: str) -> None:
        self._is_over = True
        logger.warning("no more graphs from %d rows, %d tokens on: %s", key.num_rows, key.max_seq_len, why)

    def _run(self, key: GraphKey) -> None:
        """What is recorded."""
        inputs = _Inputs.of(self._buffer, key.num_rows)
        batch = Batch(
            named_tokens(inputs.token_ids, self._sampled),
            inputs.positions,
            inputs.slot_mapping,
            self._tables.rows(inputs.slots, key.max_seq_len),
            inputs.seq_lens,
            inputs.query_start_loc,
            max_query_len=1,
            max_seq_len=key.max_seq_len,
        )
        logits = self._forward(batch)
        if logits is not None:
            self._output(logits.shape[1])[: key.num_rows].copy_(logits)

    def _output(self, vocab_size: int) -> Tensor:
        """Where all graphs leave their logits; made by the first run, which is a warm-up."""
        if self._logits is None:
            self._logits = torch.empty(self.sizes[-1], vocab_size, dtype=torch.float32, device=self._device)
        return self._logits

    # ---- playing back ----

    def replay(self, key: GraphKey, plan: StepPlan, sampled: Tensor | None) -> Tensor | None:
        """The logits of the plan's sequences, float32 ``[S, vocabulary]``, on rank 0; the next replay overwrites them.

        ``sampled`` int32: the tokens that the plan names by row.
        """
        staged = staging(_num_inputs(key.num_rows), self._device)
        self._fill(staged, key.num_rows, plan)
        self._buffer[: staged.numel()].copy_(staged, non_blocking=True)
        if sampled is not None:
            self._sampled[: sampled.numel()].copy_(sampled)
        self._graphs[key]()
        return None if self._logits is None else self._logits[: plan.slots.size]

    def _fill(self, staged: Tensor, num_rows: int, plan: StepPlan) -> None:
        num_seqs, positions = plan.slots.size, plan.num_computed_tokens
        numbers, size = staged.numpy(), 5 * aligned(num_rows)
        rows = numbers[:size].reshape(5, -1)
        rows[0, :num_seqs] = plan.token_ids
        rows[1, :num_seqs] = positions
        rows[2, :num_seqs] = self._tables.slot_mapping(plan.slots, positions)
        rows[3, :num_seqs] = positions + 1
        rows[4, :num_seqs] = plan.slots
        rows[:, num_seqs:] = 0
        rows[2, num_seqs:] = -1
        np.minimum(self._starts[: num_rows + 1], num_seqs, out=numbers[size:])

    def forget(self) -> None:
        """Drop what was recorded: the KV cache has moved."""
        self._graphs.clear()


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Rows of the graphs: 1, 2, 4, every 8 up to 256, then every 16, and the most that there can be."""
    most = min(max_num_seqs, MOST_ROWS)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, most, 16)]
    return [size for size in sizes if size < most] + [most]


def context_classes(max_model_len: int) -> list[int]:
    """Tokens of the contexts of the graphs, shortest first, the longest that there can be last."""
    classes, context = [], SHORTEST_CONTEXT
    while context < max_model_len:
        classes.append(context)
        context *= CONTEXT_FACTOR
    return [*classes, max_model_len]


def named_tokens(token_ids: Tensor, sampled: Tensor) -> Tensor:
    """``-1 - i`` becomes the i-th of ``sampled``, other ids stay."""
    return torch.where(token_ids < 0, sampled.index_select(0, (-1 - token_ids).clamp_(min=0)), token_ids)
