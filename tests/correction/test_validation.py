import math
import re

import pytest
import torch

from megatron_tim.correction import CorrectionConfig, LossConfig, correct, objective_metrics, token_objective

ZEROS, ALL = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


def padded(train: object = ZEROS, rollout: object = ZEROS, mask: object = ALL, cu_seqlens: object = None) -> None:
    correct(train, rollout, mask, CorrectionConfig(), cu_seqlens)


def packed(cu_seqlens: object) -> None:
    correct(torch.zeros(5), torch.zeros(5), torch.ones(5, dtype=torch.bool), CorrectionConfig(), cu_seqlens)


def refuses(sentence: str) -> object:
    return pytest.raises(ValueError, match="^" + re.escape(sentence) + "$")


def test_shapes() -> None:
    with refuses("rollout_logprobs has shape (2, 4); it must have the shape of train_logprobs, (2, 3)."):
        padded(rollout=torch.zeros(2, 4))
    with refuses("mask has shape (3,); it must have the shape of train_logprobs, (2, 3)."):
        padded(mask=torch.ones(3, dtype=torch.bool))
    with refuses("train_logprobs has shape (5,); without cu_seqlens it must be padded, [B, T]."):
        packed(None)
    with refuses("train_logprobs has shape (2, 3); with cu_seqlens it must be packed, [T]."):
        padded(cu_seqlens=torch.tensor([0, 6]))


def test_types() -> None:
    with refuses("train_logprobs is a list; it must be a torch.Tensor."):
        padded(train=[[0.0]])
    with refuses("rollout_logprobs is a NoneType; it must be a torch.Tensor."):
        padded(rollout=None)
    with refuses("train_logprobs has dtype torch.int64; it must be floating point."):
        padded(train=torch.zeros(2, 3, dtype=torch.int64))
    with refuses("mask has dtype torch.float32; it must be torch.bool, True on the tokens that the policy sampled."):
        padded(mask=ZEROS)


def test_devices() -> None:
    with refuses("rollout_logprobs is on meta; it must be on the device of train_logprobs, cpu."):
        padded(rollout=torch.zeros(2, 3, device="meta"))
    with refuses("cu_seqlens is on meta; it must be on the device of train_logprobs, cpu."):
        packed(torch.zeros(2, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize(
    ("offsets", "sentence"),
    [
        ([0, 4, 3, 5], "cu_seqlens falls from 4 to 3 at index 2; it must be increasing."),
        ([0, 2, 4], "cu_seqlens ends at 4; it must end at the number of tokens, 5."),
        ([0, 9], "cu_seqlens ends at 9; it must end at the number of tokens, 5."),
        ([1, 5], "cu_seqlens starts with [1]; it must start with 0."),
        ([0.0, 5.0], "cu_seqlens is torch.float32 of shape (2,); it must be an int32 or int64 tensor of shape [N + 1]."),
        ([[0, 5]], "cu_seqlens is torch.int64 of shape (1, 2); it must be an int32 or int64 tensor of shape [N + 1]."),
    ],
)
def test_offsets(offsets: list, sentence: str) -> None:
    with refuses(sentence):
        packed(torch.tensor(offsets))


def test_offsets_of_another_type() -> None:
    with refuses("cu_seqlens is list; it must be an int32 or int64 tensor of shape [N + 1]."):
        packed([0, 5])
    with refuses("cu_seqlens starts with []; it must start with 0."):
        packed(torch.tensor([], dtype=torch.int32))


@pytest.mark.parametrize("name", ["train", "rollout"])
def test_positive_log_probs(name: str) -> None:
    values = torch.tensor([[0.0, 1e-3, -1.0], [0.0, 0.25, 0.5]])
    sentence = f"{name}_logprobs[1, 1] = 0.25 is positive; a log-prob is at most 0 (up to 0.001 of rounding)."
    with refuses(sentence):
        padded(**{name: values})
    mask = ALL.clone()
    mask[1, 1:] = False
    padded(**{name: values}, mask=mask)


def objective(mode: str = "recompute", loss: LossConfig | None = None, method: str = "cis", **inputs: torch.Tensor | None) -> None:
    given = {"entropy": None, "old_logprobs": ZEROS, "rollout_logprobs": ZEROS, "advantages": ZEROS, "mask": ALL, "weights": ZEROS}
    if mode == "bypass":
        given |= {"old_logprobs": None, "weights": None}
    token_objective(ZEROS, **given | inputs, correction=CorrectionConfig(mode=mode, method=method), loss=loss or LossConfig())


@pytest.mark.parametrize("name", ["old_logprobs", "weights"])
def test_each_mode_takes_its_own_inputs(name: str) -> None:
    objective("recompute")
    objective("bypass")
    with refuses(f"{name} is None; recompute mode needs the {name} of the old policy, one for each token."):
        objective("recompute", **{name: None})
    with refuses(f"{name} is given; in bypass mode there is no old policy and it must be None."):
        objective("bypass", **{name: ZEROS})


def test_a_correction_without_effect_is_refused() -> None:
    objective("bypass", LossConfig(name="ppo"), method="none")
    objective("recompute", LossConfig(name="ppo"), method="tis")
    with refuses(
        "correction.method = 'tis' has no effect with correction.mode = 'bypass' and loss.name = 'ppo', whose ratio"
        " pi_theta / pi_rollout already holds the mismatch; set correction.method=none (rejection rules may stay), or"
        " loss.name=reinforce, or correction.mode=recompute."
    ):
        objective("bypass", LossConfig(name="ppo"), method="tis")


@pytest.mark.parametrize("name", ["train", "rollout"])
def test_temperatures(name: str) -> None:
    temperatures = {"train_temperature": 0.7, "rollout_temperature": 0.7}
    correct(ZEROS, ZEROS, ALL, CorrectionConfig(), **temperatures)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with refuses(f"{name}_temperature = {wrong} has no log-probs to correct with; it must be above 0 and finite."):
            correct(ZEROS, ZEROS, ALL, CorrectionConfig(), **temperatures | {f"{name}_temperature": wrong})


def test_log_probs_of_another_temperature() -> None:
    with refuses(
        "rollout_temperature = 1.0 differs from train_temperature = 0.7: a log-prob cannot be moved to another temperature, only"
        " logits can; record the log-probs after temperature, and score with the same one."
    ):
        correct(ZEROS, ZEROS, ALL, CorrectionConfig(), train_temperature=0.7)


def test_reference_kl_needs_the_reference() -> None:
    objective(loss=LossConfig(kl_coeff=0.5), reference_logprobs=ZEROS)
    with refuses("reference_logprobs is None; loss.kl_coeff = 0.5 needs it."):
        objective(loss=LossConfig(kl_coeff=0.5))


def test_entropy_bonus_needs_the_entropy() -> None:
    objective(loss=LossConfig(entropy_coeff=0.5), entropy=ZEROS)
    with refuses("entropy is None; loss.entropy_coeff = 0.5 needs it."):
        objective(loss=LossConfig(entropy_coeff=0.5))


@pytest.mark.parametrize("name", ["entropy", "old_logprobs", "rollout_logprobs", "advantages", "weights", "coefficients"])
def test_objective_inputs(name: str) -> None:
    with refuses(f"{name} has shape (1,); it must have the shape of logprobs, (2, 3)."):
        objective(**{name: torch.zeros(1)})
    with refuses(f"{name} has dtype torch.int64; it must be floating point."):
        objective(**{name: ZEROS.long()})
    with refuses("mask has dtype torch.int64; it must be torch.bool, True on the tokens that the policy sampled."):
        objective(mask=ZEROS.long())


@pytest.mark.parametrize("index, name", list(enumerate(["current_logprobs", "old_logprobs", "rollout_logprobs", "advantages"])))
def test_objective_metrics_inputs(index: int, name: str) -> None:
    inputs = [ZEROS] * 4
    inputs[index] = ZEROS.long()
    with refuses(f"{name} has dtype torch.int64; it must be floating point."):
        objective_metrics(*inputs, ALL)
    with refuses("mask has dtype torch.float32; it must be torch.bool, True on the tokens that the policy sampled."):
        objective_metrics(ZEROS, None, ZEROS, ZEROS, ZEROS)
