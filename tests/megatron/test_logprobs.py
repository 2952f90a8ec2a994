"""Token log-probs and entropies against the written formulas in float64: values, gradients, memory, refusals."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tim.megatron import logprobs as module
from megatron_tim.megatron.logprobs import token_logprobs


def reference(logits, rows, targets, temperature):
    """The definitions, without chunks or in-place writes."""
    logp = (logits[rows].double() / temperature).log_softmax(-1)
    p = logp.exp()
    entropy = -(p * logp.masked_fill(p == 0, 0.0)).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy, logp.argmax(-1) == targets


def run(leaf, rows, targets, **kwargs):
    """The function under test on a copy: it overwrites its input in the backward pass."""
    return token_logprobs(leaf * 1, rows, targets, **kwargs)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 9),
    vocab=st.integers(1, 12),
    chunk=st.integers(1, 10),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    scale=st.sampled_from([0.1, 3.0, 60.0]),
)
def test_values_and_gradients_equal_the_formulas(seed, tokens, vocab, chunk, temperature, scale):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64) * scale
    rows = torch.randperm(tokens, generator=generator)[: int(torch.randint(0, tokens + 1, (), generator=generator))]
    targets = torch.randint(vocab, (len(rows),), generator=generator)
    weight = torch.randn(2, len(rows), generator=generator, dtype=torch.float64)
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()

    got = run(mine, rows, targets, temperature=temperature, chunk_tokens=chunk)
    expected = reference(theirs, rows, targets, temperature)
    torch.testing.assert_close(got.logprobs, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.entropy, expected[1], rtol=1e-11, atol=1e-11)
    assert torch.equal(got.is_top, expected[2])

    (weight[0] * got.logprobs + weight[1] * got.entropy).sum().backward()
    (weight[0] * expected[0] + weight[1] * expected[1]).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)


def test_each_output_alone_gives_its_own_gradient():
    torch.manual_seed(0)
    logits, rows, targets = torch.randn(5, 7, dtype=torch.float64), torch.tensor([4, 1, 2]), torch.tensor([0, 6, 3])
    for name, index in (("logprobs", 0), ("entropy", 1)):
        mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        getattr(run(mine, rows, targets, temperature=0.6, chunk_tokens=2), name).sum().backward()
        reference(theirs, rows, targets, 0.6)[index].sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
        assert (mine.grad[[0, 3]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_are_widened_before_the_softmax(dtype):
    torch.manual_seed(1)
    logits = (torch.randn(64, 300) * 4).to(dtype)
    rows, targets = torch.arange(64), torch.randint(300, (64,))
    got = run(logits.requires_grad_(), rows, targets, temperature=0.9, chunk_tokens=13)
    expected = reference(logits.detach(), rows, targets, 0.9)
    assert got.logprobs.dtype == got.entropy.dtype == torch.float32
    torch.testing.assert_close(got.logprobs.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
    got.logprobs.sum().backward()
    assert logits.grad.dtype == dtype


def test_masked_vocabulary_and_extreme_logits_stay_finite():
    logits = torch.tensor([[-math.inf, 0.0, 1.0], [1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    targets = torch.tensor([1, 0, 2])
    got = run(logits, torch.arange(3), targets, temperature=0.5)
    expected = reference(logits.detach(), torch.arange(3), targets, 0.5)
    torch.testing.assert_close(got.logprobs.double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.entropy.double(), expected[1], rtol=1e-5, atol=1e-6)
    (got.logprobs + got.entropy).sum().backward()
    assert torch.isfinite(logits.grad).all() and logits.grad[0, 0] == 0


def test_a_token_ties_for_the_top():
    got = run(torch.tensor([[1.0, 1.0, 0.0]] * 3), torch.arange(3), torch.tensor([0, 1, 2]))
    assert got.is_top.tolist() == [True, True, False]


def test_the_backward_pass_holds_no_second_copy_of_the_logits():
    logits = torch.randn(6, 11).requires_grad_()
    held = logits * 1
    out = token_logprobs(held, torch.arange(6), torch.zeros(6, dtype=torch.int64))
    received = []
    held.register_hook(lambda grad: received.append(grad.data_ptr()))
    out.logprobs.sum().backward()
    assert received == [held.data_ptr()]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"chunk_tokens": 0}, "chunk_tokens = 0"),
        ({"logits": torch.zeros(1, 2, 3)}, r"logits \(1, 2, 3\)"),
        ({"rows": torch.zeros(1, 2, dtype=torch.int64)}, r"rows \(1, 2\)"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets \(3,\)"),
    ],
)
def test_wrong_input_is_named(change, word):
    arguments = {"logits": torch.zeros(4, 3), "rows": torch.arange(2), "targets": torch.arange(2)} | change
    with pytest.raises(ValueError, match=word):
        token_logprobs(**arguments)


class ThreadRanks:
    """Two threads as the ranks of a group: enough of torch.distributed for the function under test."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self):
        self._barrier, self._slots, self._local = threading.Barrier(2, timeout=30), [None, None], threading.local()

    def get_world_size(self, group):
        return 2

    def get_rank(self, group):
        return self._local.rank

    def all_reduce(self, x, op, group):
        assert group == "pair"
        self._slots[self._local.rank] = x.clone()
        self._barrier.wait()
        stacked = torch.stack(self._slots)
        self._barrier.wait()
        x.copy_(stacked.amax(0) if op == self.ReduceOp.MAX else stacked.sum(0))

    def run(self, work):
        def as_rank(rank):
            self._local.rank = rank
            return work(rank)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(as_rank, range(2)))


@pytest.mark.parametrize("seed", range(6))
def test_two_ranks_with_half_the_vocabulary_each_equal_one(seed, monkeypatch):
    torch.manual_seed(seed)
    logits = torch.randn(7, 10, dtype=torch.float64) * 3
    logits[0, 2] = logits[0, 7] = 9.0  # a tie for the top across the ranks
    rows, targets = torch.tensor([0, 5, 3, 6, 1]), torch.tensor([7, 0, 4, 5, 9])
    weight = torch.randn(2, 5, dtype=torch.float64)
    whole = logits.clone().requires_grad_()
    expected = reference(whole, rows, targets, 0.7)
    (weight[0] * expected[0] + weight[1] * expected[1]).sum().backward()
    ranks = ThreadRanks()
    monkeypatch.setattr(module, "dist", ranks)

    def work(rank):
        leaf = logits[:, 5 * rank : 5 * rank + 5].clone().requires_grad_()
        got = run(leaf, rows, targets, temperature=0.7, chunk_tokens=2, group="pair")
        (weight[0] * got.logprobs + weight[1] * got.entropy).sum().backward()
        return got, leaf.grad

    for got, _ in (results := ranks.run(work)):
        torch.testing.assert_close(got.logprobs, expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got.entropy, expected[1], rtol=1e-11, atol=1e-11)
        assert got.is_top.tolist() == [True, *expected[2].tolist()[1:]]
    torch.testing.assert_close(torch.cat([grad for _, grad in results], 1), whole.grad, rtol=1e-9, atol=1e-11)
