"""The policy step: one denominator, whatever the expert parallelism and the micro-batches; equal to the written formula."""

import pytest
import torch

from tests.helpers import make_tiny_qwen3_moe
from tests.megatron.hf_reference import per_expert_gradients
from tests.processes import torchrun

COMBINATIONS = [("reinforce", "recompute"), ("ppo", "recompute"), ("reinforce", "bypass"), ("ppo", "bypass")]
ONE, FOUR = 4096, {1: 56, 2: 26}  # token budgets that give one and four micro-batches a rank


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """Ragged samples with an old policy and a rollout policy that are not the current one, and masked tokens."""
    folder = tmp_path_factory.mktemp("policy")
    model = make_tiny_qwen3_moe(folder / "model", seed=5)
    generator = torch.Generator().manual_seed(2)
    samples = []
    for prompt, response in [(5, 9), (12, 3), (1, 20), (7, 13), (3, 25), (20, 4), (2, 6), (9, 17), (4, 8), (6, 11)]:
        noise = torch.randn(3, response, generator=generator) * 0.3
        fields = {
            "rollout_logprobs": (-2.0 + noise[0]).clamp(max=-0.01),
            "old_logprobs": (-2.0 + noise[1]).clamp(max=-0.01),
            "advantages": torch.randn(1, generator=generator).expand(response).clone(),
            "weights": 1 + 0.5 * noise[2].abs(),
            "mask": torch.rand(response, generator=generator) > 0.2,
        }
        tokens = torch.randint(4, 500, (prompt + response,), generator=generator)
        samples.append({"tokens": tokens, "prompt_length": prompt, "fields": fields})
    # A sequence of which nothing counts, and one token whose old log-prob is not a number.
    samples[3]["fields"]["mask"][:] = False
    samples[0]["fields"]["old_logprobs"][2] = float("nan")
    torch.save({"samples": samples}, folder / "batch.pt")
    return folder, model, samples


@pytest.fixture(scope="module")
def facts(batch):
    folder, model, _ = batch
    found = {}
    for processes in (1, 2):
        cases = [f"ep{processes}-budget{budget}-{loss}-{mode}" for budget in (ONE, FOUR[processes]) for loss, mode in COMBINATIONS]
        torchrun(processes, "tests/training/policy_worker.py", model, folder / "batch.pt", folder, *cases)
        found |= {case: torch.load(folder / f"{case}.pt", weights_only=False) for case in cases}
    return found


def test_the_cases_have_one_and_four_micro_batches(facts):
    assert {case.split("-")[1]: f["micro_batches"] for case, f in facts.items()} == {"budget4096": 1, "budget56": 4, "budget26": 4}


@pytest.mark.parametrize(("loss", "mode"), COMBINATIONS)
def test_gradients_and_metrics_do_not_depend_on_the_layout(facts, loss, mode):
    first, *others = [f for case, f in facts.items() if case.endswith(f"{loss}-{mode}")]
    assert len(others) == 3
    for other in others:
        worst = max((other["gradients"][n] - g).abs().max().item() for n, g in first["gradients"].items())
        assert worst < 1e-5
        assert other["metrics"] == pytest.approx(first["metrics"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("loss", "mode"), COMBINATIONS)
def test_gradients_equal_the_written_formula(facts, batch, loss, mode):
    expected = formula_gradients(batch[1], batch[2], loss, mode)
    got = facts[f"ep2-budget26-{loss}-{mode}"]["gradients"]
    assert got.keys() == expected.keys()
    assert max((got[n] - g).abs().max().item() for n, g in expected.items()) < 1e-5
    assert max(g.abs().max().item() for g in expected.values()) > 1e-3


def formula_gradients(model_path, samples, loss, mode):
    """A loop over sequences with transformers, the losses written out token by token."""
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
    total, tokens = 0.0, 0
    for sample in samples:
        fields, prompt = sample["fields"], sample["prompt_length"]
        logp = model(sample["tokens"][None]).logits[0, prompt - 1 : -1].double().log_softmax(-1)
        chosen = logp.gather(1, sample["tokens"][prompt:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        for t in range(len(chosen)):
            if not fields["mask"][t]:
                continue
            tokens += 1
            total = total - 0.02 * entropy[t]
            q, a = fields["rollout_logprobs"][t].double(), fields["advantages"][t].double()
            old, weight = fields["old_logprobs"][t].double(), fields["weights"][t].double()
            if mode == "bypass":
                p = chosen[t].detach().exp()
                k = p / q.exp()
                old, weight = q, torch.minimum(k, 1 + 2.3 * torch.clamp(1 - p, min=5e-3))
            elif torch.isnan(old):
                continue
            if loss == "reinforce":
                total = total - a * weight * chosen[t]
            else:
                r = (chosen[t] - old).exp()
                clipped = torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
                total = total - (clipped if mode == "bypass" else weight * clipped)
    (total / tokens).backward()
    return per_expert_gradients(model)
