"""LayerProgram: a model's layers on CPUs, recorded once and run as one list of kernel calls in each step."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ..kernels.cpu_program import BatchSizes, NotRecordable, Team
from ..kernels.kv_cache import KVCache
from .model.batch import Batch
from .model.transformer import Transformer

logger = logging.getLogger(__name__)


class LayerProgram:
    """What ``model.hidden`` computes, for up to ``max_tokens`` tokens of up to ``max_num_seqs`` sequences.

    Its inputs and outputs lie in buffers of its own. Rows beyond the longest step so far were never written: they take
    no memory. Raises NotRecordable where a layer cannot be recorded.
    """

    def __init__(
        self,
        model: Transformer,
        caches: list[KVCache],
        team: Team,
        *,
        max_tokens: int,
        max_num_seqs: int,
        max_blocks: int,
    ) -> None:
        self._embedding = model.embedding
        self._x = torch.empty(max_tokens, model.hidden_size)
        numbers = torch.empty(2 * max_tokens + 2 * max_num_seqs + 1, dtype=torch.int32)
        sizes = [max_tokens, max_tokens, max_num_seqs, max_num_seqs + 1]
        self._positions, self._slot_mapping, self._seq_lens, self._starts = torch.split(numbers, sizes)
        self._tables = torch.empty(max_num_seqs * max_blocks, dtype=torch.int32)
        most = Batch(  # the sizes and the token ids do not matter: nothing is computed yet
            self._positions,
            self._positions,
            self._slot_mapping,
            self._tables.view(max_num_seqs, max_blocks),
            self._seq_lens,
            self._starts,
            max_query_len=max_tokens,
            max_seq_len=max_tokens,
        )
        self._program, self._result = team.record(lambda: model.transform(self._x, most, caches))

    def run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """As ``model.hidden``; the next run overwrites what it gives."""
        num_tokens, (num_seqs, width) = batch.token_ids.shape[0], batch.block_tables.shape
        self._x[:num_tokens] = self._embedding(batch.token_ids)
        self._positions[:num_tokens] = batch.positions
        self._slot_mapping[:num_tokens] = batch.slot_mapping
        self._seq_lens[:num_seqs] = batch.seq_lens
        self._starts[: num_seqs + 1] = batch.query_start_loc
        self._tables[: num_seqs * width].view(num_seqs, width).copy_(batch.block_tables)
        sizes = BatchSizes(num_tokens, num_seqs, batch.max_query_len, batch.max_seq_len, width)
        self._program.play(num_tokens, sizes)
        x, residual = self._result
        return x[:num_tokens], residual[:num_tokens]


def record_layers(
    model: Transformer, caches: list[KVCache], team: Team, *, max_tokens: int, max_num_seqs: int, max_blocks: int
) -> LayerProgram | None:
    """None where a layer cannot be recorded; says why."""
    try:
        return LayerProgram(
            model, caches, team, max_tokens=max_tokens, max_num_seqs=max_num_seqs, max_blocks=max_blocks
        )
    except NotRecordable as reason:
        logger.warning("kernels are called one by one, which takes longer: %s", reason)
        return None
