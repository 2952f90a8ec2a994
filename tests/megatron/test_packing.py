"""Packing: nothing lost, nothing split, the same number of micro-batches on every rank, rows that predict the right tokens."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tim.megatron.packing import Sample, pack, plan_micro_batches

CPU = torch.device("cpu")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(2, 60), max_size=40), st.integers(1, 120), st.integers(1, 5))
def test_a_plan_holds_every_sequence_once_within_the_budget(lengths, budget, ranks):
    plan = plan_micro_batches(lengths, budget, ranks)
    assert len(plan) == ranks and len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= 1
    assert sorted(i for rank in plan for batch in rank for i in batch) == list(range(len(lengths)))
    for batch in (batch for rank in plan for batch in rank):
        assert sum(lengths[i] for i in batch) <= max(budget, max(lengths, default=0))


def test_a_plan_is_balanced():
    plan = plan_micro_batches([100, 1, 1, 1, 50, 50], 10_000, 2)
    assert sorted(sum([100, 1, 1, 1, 50, 50][i] for i in rank[0]) for rank in plan) == [101, 102]


@st.composite
def samples(draw):
    count = draw(st.integers(1, 6))
    made = []
    for number in range(count):
        prompt, response = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        tokens = torch.arange(prompt + response) + 100 * number
        made.append(
            Sample(tokens, prompt, {"position": torch.arange(response) + 100 * number, "mask": torch.ones(response, dtype=torch.bool)})
        )
    return made


@settings(max_examples=100, deadline=None)
@given(samples(), st.sampled_from([1, 2, 4, 8]), st.data())
def test_rows_predict_their_targets(made, multiple, data):
    indices = data.draw(st.lists(st.sampled_from(range(len(made))), unique=True))
    batch = pack(made, indices, CPU, multiple)
    tokens = batch.input_ids[0]
    assert len(tokens) % multiple == 0 and len(tokens) >= 1
    # The token after a scored row, in the same sequence, is the row's target.
    assert torch.equal(tokens[batch.rows + 1], batch.targets)
    assert torch.equal(batch.position_ids[0][batch.rows + 1], batch.position_ids[0][batch.rows] + 1)
    for number, index in enumerate(batch.indices):
        here = slice(batch.cu_seqlens[number], batch.cu_seqlens[number + 1])
        sample = made[index]
        assert torch.equal(batch.targets[here], sample.tokens[sample.prompt_length :])
        assert torch.equal(batch.fields["position"][here], sample.fields["position"])
        start = batch.row_starts[number]
        assert torch.equal(tokens[start : start + len(sample.tokens)], sample.tokens)
    cu = batch.packed_seq_params.cu_seqlens_q
    assert cu[0] == 0 and cu[-1] == len(tokens) and (cu.diff() > 0).all() and batch.packed_seq_params.max_seqlen_q == cu.diff().max()


def test_an_empty_share_scores_nothing_and_keeps_the_dtypes():
    batch = pack([Sample(torch.arange(4), 2, {"mask": torch.ones(2, dtype=torch.bool)})], [], CPU)
    assert batch.input_ids.shape == (1, 1) and len(batch.rows) == len(batch.targets) == 0
    assert batch.cu_seqlens.tolist() == [0] and batch.fields["mask"].dtype == torch.bool
