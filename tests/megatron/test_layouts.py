"""Logits, routes and gradients against transformers in every layout, and weights there and back."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import make_tiny_qwen3_moe
from tests.megatron.hf_reference import per_expert_gradients
from tests.processes import torchrun

TEMPERATURE = 0.8
LAYOUTS = {
    1: [
        "tp1-pp1-ep1-etp1-budget4096-none-float32",
        "tp1-pp1-ep1-etp1-budget64-none-float32",
        "tp1-pp1-ep1-etp1-budget64-full-float32",
        "tp1-pp1-ep1-etp1-budget64-selective-float32",
    ],
    2: [
        "tp1-pp1-ep2-etp1-budget4096-none-float32",
        "tp1-pp1-ep2-etp1-budget40-none-float32",
        "tp1-pp2-ep1-etp1-budget64-none-float32",
        "tp1-pp1-ep1-etp1-budget64-none-float32",
        "tp2-pp1-ep1-etp2-budget64-none-float32",
        "tp2-pp1-ep2-etp1-budget64-none-float32",
    ],
    4: ["tp1-pp2-ep2-etp1-budget40-none-float32", "tp2-pp2-ep2-etp1-budget64-full-float32"],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A tiny random model and what transformers computes with it in float64 and float32."""
    folder = tmp_path_factory.mktemp("layouts")
    hf_path = folder / "model"
    generator = torch.Generator().manual_seed(0)
    make_tiny_qwen3_moe(hf_path, seed=3)
    vary_norms(hf_path / "model.safetensors", generator)
    samples = []
    for prompt, response in [(5, 9), (12, 1), (1, 20), (7, 13), (3, 30), (20, 4), (2, 6)]:
        tokens = torch.randint(4, 500, (prompt + response,), generator=generator)
        advantages = torch.randn(response, generator=generator)
        samples.append({"tokens": tokens, "prompt_length": prompt, "fields": {"advantages": advantages}})
    return folder, hf_path, samples, hf_facts(hf_path, samples)


def vary_norms(path, generator):
    """Norms that differ from 1 and from each other, so that two of them exchanged would show."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.mul_(1 + 0.2 * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, path, metadata={"format": "pt"})


def hf_facts(hf_path, samples):
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(hf_path, dtype=torch.float32, attn_implementation="eager")
    logprobs, entropies, tops, routes, loss = [], [], [], [], 0.0
    for sample in samples:
        tokens, prompt = sample["tokens"], sample["prompt_length"]
        out = model(tokens[None], output_router_logits=True)
        logp = (out.logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
        chosen = logp.gather(1, tokens[prompt:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        loss = loss - (sample["fields"]["advantages"] * chosen).sum() - 0.1 * entropy.sum()
        logprobs.append(chosen.detach())
        tops.append(logp.argmax(-1) == tokens[prompt:])
        entropies.append(entropy.detach())
        topk = torch.stack([r.topk(model.config.num_experts_per_tok).indices.sort().values for r in out.router_logits], 1)
        routes.append(topk[: len(tokens) - 1].numpy())
    total = sum(len(x) for x in logprobs)
    (loss / total).backward()
    gradients = {name: grad.clone() for name, grad in per_expert_gradients(model).items()}
    return {
        "logprobs_after_a_step": logprobs_after_a_step(model, samples),
        "logprobs": torch.cat(logprobs),
        "entropy": torch.cat(entropies),
        "is_top": torch.cat(tops),
        "routes": routes,
        "loss": (loss / total).item(),
        "gradients": gradients,
    }


@torch.no_grad()
def logprobs_after_a_step(model, samples):
    """torch's own AdamW and clipping, with the settings of layout_worker.py."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8).step()
    chosen = []
    for sample in samples:
        tokens, prompt = sample["tokens"], sample["prompt_length"]
        logp = (model(tokens[None]).logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
        chosen.append(logp.gather(1, tokens[prompt:, None])[:, 0])
    return torch.cat(chosen)


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def results(request, reference):
    folder, hf_path, samples, _ = reference
    torch.save({"samples": samples}, folder / "samples.pt")
    torchrun(request.param, "tests/megatron/layout_worker.py", hf_path, folder / "samples.pt", folder, *LAYOUTS[request.param])
    return folder, [(layout, torch.load(folder / f"{layout}.pt", weights_only=False)) for layout in LAYOUTS[request.param]]


def test_logprobs_routes_loss_and_gradients_equal_transformers(results, reference):
    expected = reference[3]
    for layout, got in results[1]:
        assert (got["logprobs"] - expected["logprobs"]).abs().max() < 1e-4, layout
        assert (got["entropy"] - expected["entropy"]).abs().max() < 1e-4, layout
        assert torch.equal(got["is_top"], expected["is_top"]), layout
        assert abs(got["loss"] - expected["loss"]) < 1e-5, layout
        for mine, theirs in zip(got["routes"], expected["routes"], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=layout)
        assert got["gradients"].keys() == expected["gradients"].keys(), layout
        worst = {n: (g - expected["gradients"][n]).abs().max().item() for n, g in got["gradients"].items()}
        assert max(worst.values()) < 1e-5, (layout, max(worst, key=worst.get), max(worst.values()))


def test_gradient_norm_is_that_of_the_whole_model_and_a_step_is_the_same_everywhere(results, reference):
    expected = torch.stack([grad.double().norm() for grad in reference[3]["gradients"].values()]).norm().item()
    for layout, got in results[1]:
        assert got["grad_norm"] == pytest.approx(expected, rel=1e-4), layout
        after = reference[3]["logprobs_after_a_step"]
        assert (got["logprobs_after_a_step"] - after).abs().max() < 1e-3, layout


def test_weights_come_back_bit_identical(results, reference):
    original = load_file(reference[1] / "model.safetensors")
    for layout, _ in results[1]:
        exported = {}
        for path in sorted((results[0] / layout).glob("*.safetensors")):
            exported.update(load_file(path))
        assert exported.keys() == original.keys(), layout
        for name, tensor in original.items():
            assert exported[name].dtype == tensor.dtype and torch.equal(exported[name], tensor), (layout, name)


def test_bfloat16_scores_and_steps_close_to_float32(reference):
    folder, hf_path, samples, expected = reference
    torch.save({"samples": samples}, folder / "samples.pt")
    layout = "tp1-pp1-ep2-etp1-budget64-none-bfloat16"
    torchrun(2, "tests/megatron/layout_worker.py", hf_path, folder / "samples.pt", folder, layout)
    got = torch.load(folder / f"{layout}.pt", weights_only=False)
    assert 0 < (got["logprobs"] - expected["logprobs"]).abs().mean() < 0.1
    norm = torch.stack([grad.double().norm() for grad in expected["gradients"].values()]).norm().item()
    assert got["grad_norm"] == pytest.approx(norm, rel=0.1)
    moved = (expected["logprobs_after_a_step"] - expected["logprobs"]).abs().mean()
    assert 0.5 * moved < (got["logprobs_after_a_step"] - got["logprobs"]).abs().mean() < 2 * moved
    original = load_file(hf_path / "model.safetensors")
    exported = {}
    for path in (folder / layout).glob("*.safetensors"):
        exported.update(load_file(path))
    assert all(torch.equal(exported[name], tensor.bfloat16()) for name, tensor in original.items())
