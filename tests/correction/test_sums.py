import itertools
import multiprocessing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.correction import CorrectionConfig, MetricSums, correct, summarise
from tests.correction.batches import Token, cu_seqlens, examples, packed, packed_mask, sequences


def sums_of(rows: list[list[Token]]) -> MetricSums:
    return correct(packed(rows, "train"), packed(rows, "rollout"), packed_mask(rows), CorrectionConfig(), cu_seqlens(rows)).sums


@examples
@given(rows=sequences(), cut=st.integers(0, 5))
def test_uneven_shards_combine_to_the_single_process_value(rows: list[list[Token]], cut: int) -> None:
    shards = [rows[:cut], rows[cut:], []]
    combined = summarise(sum(map(sums_of, shards), MetricSums()))
    whole = summarise(sums_of(rows))
    assert combined.keys() == whole.keys()
    for name, value in whole.items():
        assert combined[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_names_of_one_side_are_kept() -> None:
    left = MetricSums({"a": torch.tensor(1.0), "b": torch.tensor(2.0)}, {"x": torch.tensor(5.0)})
    right = MetricSums({"b": torch.tensor(3.0), "c": torch.tensor(4.0)}, {"x": torch.tensor(4.0), "y": torch.tensor(-1.0)})
    expected = {"a": 1, "b": 5, "c": 4, "x": 5, "y": -1}
    assert (left + right).to_floats() == (right + left).to_floats() == expected


def test_tensors_and_back() -> None:
    sums = sums_of([[Token(-1.0, -1.5, True)]])
    back = MetricSums.from_tensors(sums.to_tensors())
    assert back.sums == sums.sums and back.maxima == sums.maxima and back.tables.keys() == sums.tables.keys()
    assert all(torch.equal(back.tables[name], table) for name, table in sums.tables.items())
    assert MetricSums.from_tensors(MetricSums().to_tensors()) == MetricSums()


def test_tables_add_up_element_by_element() -> None:
    left, right = (MetricSums(tables={"t": torch.tensor([[1.0, 2.0]]) * factor}) for factor in (1, 10))
    assert (left + right).tables["t"].tolist() == [[11, 22]]
    assert MetricSums({"a": torch.tensor(3.0)}, {"m": torch.tensor(3.0)}, left.tables).scaled(0.5).to_tensors().keys() == {
        *("sums:a", "maxima:m", "tables:t")
    }
    halved = MetricSums({"a": torch.tensor(3.0)}, {"m": torch.tensor(3.0)}, left.tables).scaled(0.5)
    assert halved.to_floats() == {"a": 1.5, "m": 3} and halved.tables["t"].tolist() == [[0.5, 1]]


def test_prefixes() -> None:
    one = torch.tensor(1.0)
    sums = MetricSums({"a": one}, {"b": one}, {"c": one}).with_prefix("x/") + MetricSums({"a": one + 1})
    assert set(sums.to_tensors()) == {"sums:x/a", "sums:a", "maxima:x/b", "tables:x/c"}
    below = sums.below("x/")
    assert below.to_floats() == {"a": 1, "b": 1} and set(below.tables) == {"c"}


def test_nothing_summed_is_nothing_reported() -> None:
    assert MetricSums().to_floats() == {} and summarise(MetricSums()) == {}


def test_sums_are_fp64_scalars() -> None:
    sums = sums_of([[Token(-1.0, -1.0, True)]])
    for value in itertools.chain(sums.sums.values(), sums.maxima.values()):
        assert value.dtype == torch.float64 and value.shape == ()


RANK_VALUES = [(1.0, 2.0, -7.0), (10.0, 20.0, -5.0)]


def reduce_as(rank: int, store: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The sums of both ranks together, and those of this rank reduced over a group of its own."""
    a, b, top = RANK_VALUES[rank]
    named = {"a": torch.tensor(a), "b": torch.tensor(b)}
    ordered = dict(sorted(named.items(), reverse=rank == 1))  # the ranks met the names in different orders
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        alone = [dist.new_group([0]), dist.new_group([1])][rank]
        own = MetricSums(ordered, {"top": torch.tensor(top)}, {"a": torch.full((2, 3), a)})
        together = own.all_reduce() + MetricSums().all_reduce()
        assert together.tables["a"].tolist() == [[11.0] * 3] * 2
        return together.to_floats(), own.all_reduce(alone).to_floats()
    finally:
        dist.destroy_process_group()


def test_all_reduce_adds_sums_and_takes_maxima(tmp_path: Path) -> None:
    other = multiprocessing.get_context("spawn").Process(target=reduce_as, args=(1, tmp_path / "store"), daemon=True)
    other.start()
    try:
        assert reduce_as(0, tmp_path / "store") == ({"a": 11, "b": 22, "top": -5}, {"a": 1, "b": 2, "top": -7})
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()
