"""Recorded rollouts: taken as they are when they answer the step's prompts, refused by file and row when they cannot."""

import dataclasses

import numpy as np
import pytest

from megatron_tim.config import RolloutConfig
from megatron_tim.errors import UserError
from megatron_tim.rollout.records import save_trajectories
from megatron_tim.rollout.source import RecordedSource
from tests.rollout.examples import assert_same, make_trajectory

VOCABULARY = 1000


def recording():
    """Two prompts with three answers each."""
    prompts = [make_trajectory(seed=index).prompt_ids for index in (0, 1)]
    return [make_trajectory(seed=10 + n, prompt_index=n // 3, group=n // 3, prompt_ids=prompts[n // 3], reward=0.0) for n in range(6)]


def replay(tmp_path, trajectories, prompts=None):
    save_trajectories(tmp_path / "step_000001.parquet", trajectories)
    asked = prompts or [(t.prompt_index, t.prompt_ids.tolist()) for t in recording()[::3]]
    config = RolloutConfig(engine="recorded", recorded_dir=tmp_path, samples_per_prompt=3)
    return RecordedSource(config, VOCABULARY).sample(1, asked)


def test_what_was_recorded_comes_back(tmp_path):
    for returned, saved in zip(replay(tmp_path, recording()), recording(), strict=True):
        assert_same(returned, saved)


def test_a_prompt_that_comes_twice_in_a_step_has_two_groups(tmp_path):
    trajectories = [dataclasses.replace(t, group=group) for group in (0, 1) for t in recording()[:3]]
    prompt = (0, recording()[0].prompt_ids.tolist())
    assert len(replay(tmp_path, trajectories, [prompt, prompt])) == 6


def changed(row, **changes):
    trajectories = recording()
    trajectories[row] = dataclasses.replace(trajectories[row], **changes)
    return trajectories


def of(row, name, value):
    array = getattr(recording()[row], name).copy()
    array[1] = value
    return changed(row, **{name: array})


BROKEN = {
    "token id": (of(4, "response_ids", 1000), "row 4: response_ids reach from .* to 1000, the model's vocabulary has 1000 entries"),
    "log-prob": (of(2, "rollout_logprobs", 0.5), "row 2: rollout_logprobs reach 0.5, a log-prob is at most 0"),
    "infinite": (of(2, "rollout_logprobs", np.inf), "row 2: rollout_logprobs reach inf"),
    "temperature": (changed(1, logprob_temperature=0.5), "log-probs of temperature 0.5"),
    "other prompt": (of(3, "prompt_ids", 7), "row 3 answers another prompt"),
    "too few": (recording()[:5], "holds 5 trajectories, this run asks for 6"),
    "one group": (
        [dataclasses.replace(t, group=0) for t in recording()[:3]] * 2,
        "group 0 holds 6 answers to prompt 0, this run asks for 3",
    ),
    "split group": (changed(5, group=9), "group 1 holds 2 answers to prompt 1, this run asks for 3"),
    "one prompt": ([dataclasses.replace(t, group=g) for g in (0, 1) for t in recording()[:3]], "holds 6 answers to prompt 0"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_recording_is_refused(tmp_path, case):
    trajectories, words = BROKEN[case]
    with pytest.raises(UserError, match=words) as refusal:
        replay(tmp_path, trajectories)
    assert "step_000001.parquet" in str(refusal.value)


def test_a_token_that_was_not_sampled_may_hold_any_log_prob(tmp_path):
    mask = np.array([True, False, True, True])
    trajectories = of(2, "rollout_logprobs", 0.5)
    trajectories[2] = dataclasses.replace(trajectories[2], response_mask=mask)
    assert len(replay(tmp_path, trajectories)) == 6
