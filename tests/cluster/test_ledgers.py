"""Groups that are alike are shown once, by the one that has the least."""

from __future__ import annotations

from octavo.cluster.ledgers import RankLedger, accounts


def ledger(num_blocks: int, *, rank: int = 0, device: str = "cpu") -> RankLedger:
    return RankLedger(rank, num_blocks, f"{device}  GiB\n  = {num_blocks} blocks")


def titles(*ledgers: RankLedger) -> list[str]:
    return [account.partition("\n")[0] for account in accounts(ledgers)]


def test_one_rank() -> None:
    assert accounts([ledger(100)]) == ["memory of rank 0\ncpu  GiB\n  = 100 blocks"]


def test_identical_groups_are_counted() -> None:
    assert titles(ledger(100), ledger(100)) == ["memory of rank 0 × 2"]


def test_groups_that_differ_a_little_are_shown_by_the_least() -> None:
    assert accounts([ledger(1050), ledger(1000), ledger(1020)]) == [
        "memory of rank 0 × 3 (the least; the others have up to 1,050 blocks)\ncpu  GiB\n  = 1000 blocks"
    ]


def test_ranks_devices_and_pools_of_another_size_are_shown_apart() -> None:
    assert titles(ledger(100), ledger(100, rank=1), ledger(100, device="cuda:0, H200"), ledger(200)) == [
        "memory of rank 0",
        "memory of rank 0",
        "memory of rank 0",
        "memory of rank 1",
    ]
