"""Block tables: what a plan changes reaches the host's copy and, as flat places, the device's."""

from __future__ import annotations

import numpy as np
import torch

from octavo.worker.block_tables import BlockTables
from octavo.worker.step_plan import PlanKind, StepPlan

CPU = torch.device("cpu")
UPDATES = np.array([[2, 0, 3], [0, 4, 1], [3, 1, 2]], np.int32)
BLOCKS = np.array([7, 5, 9, 8, 4, 6], np.int32)


def updated() -> BlockTables:
    tables = BlockTables(num_slots=4, max_blocks=20, block_size=4, device=CPU)
    tables.update(StepPlan(PlanKind.STEP, table_updates=UPDATES, table_blocks=BLOCKS))
    return tables


def test_an_update_covers_its_part_of_a_slots_table() -> None:
    rows = updated().rows(torch.tensor([3, 2, 0, 1], dtype=torch.int32), max_seq_len=20)
    assert rows[:, :5].tolist() == [[0, 4, 6, 0, 0], [7, 5, 9, 0, 0], [0, 0, 0, 0, 8], [0, 0, 0, 0, 0]]


def test_the_device_gets_the_same_by_flat_places() -> None:
    flat = torch.zeros(4 * 20, dtype=torch.int32)
    tables = updated()
    flat.index_put_((torch.from_numpy(tables._places(UPDATES)),), torch.from_numpy(BLOCKS))
    assert torch.equal(flat.view(4, 20), tables.rows(torch.arange(4), max_seq_len=80))


def test_tables_are_as_wide_as_the_longest_sequence_needs() -> None:
    slots = torch.tensor([2], dtype=torch.int32)
    widths = [updated().rows(slots, max_seq_len).shape[1] for max_seq_len in (1, 64, 65, 80)]
    assert widths == [1, 16, 17, 20]


def test_tokens_go_to_the_slots_of_their_positions() -> None:
    slots, positions = np.array([2, 2, 3], np.int32), np.array([3, 9, 5], np.int32)
    assert updated().slot_mapping(slots, positions).tolist() == [7 * 4 + 3, 9 * 4 + 1, 4 * 4 + 1]
