import pytest
import torch

from megatron_tim.correction.sequences import sequence_sum


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
def test_both_layouts_add_up_in_fp64(dtype: torch.dtype) -> None:
    padded = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]).to(dtype)
    packed, offsets = torch.tensor([1, 1, 1, 1, 1]).to(dtype), torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    for sums in (sequence_sum(padded, None), sequence_sum(packed, offsets)):
        assert sums.dtype == torch.float64 and sums.tolist() == [2, 0, 3]


def test_a_long_sequence_keeps_its_digits() -> None:
    tenths = torch.full((1, 100_000), 0.1)
    for sums in (sequence_sum(tenths, None), sequence_sum(tenths[0], torch.tensor([0, 100_000]))):
        assert sums.item() == pytest.approx(100_000 * tenths[0, 0].item(), rel=1e-12)
