"""The run's configuration: one typed, documented section per component, read from YAML plus ``key=value``.

An unknown key, a wrong type or a combination that has no meaning is refused here, before anything
starts, with the key, the value and what is allowed. Every other module receives validated objects.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from megatron_tim.correction import AdvantageConfig, CorrectionConfig, LossConfig, Settings, check_combination
from megatron_tim.errors import UserError, writing


class RunConfig(Settings):
    name: str = Field(description="Name of the run; its files are in DIR/NAME.", pattern=r"^[\w][\w.+-]*$")
    dir: Path = Field(Path("runs"), description="Folder that holds the runs.")
    seed: int = Field(1, ge=0, lt=2**31, description="Seeds the data order, the sampler and the trainer.")
    steps: int = Field(ge=0, description="RL steps: rollouts sampled, corrected and trained on.")
    save_every: int = Field(10, ge=1, description="Steps between checkpoints; the last step is always saved.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints to keep.")
    tensorboard: bool = Field(True, description="Write TensorBoard curves beside metrics.jsonl.")

    @property
    def path(self) -> Path:
        return self.dir / self.name


class ModelConfig(Settings):
    hf_path: Path = Field(description="Folder with a Hugging Face config.json, tokenizer and safetensors.")


class DataConfig(Settings):
    train: Path = Field(description="JSONL with `question` and `answer` (GSM8K's form: the answer ends in '#### 42').")
    eval: Path = Field(description="JSONL of the same form, never trained on.")
    prompt_template: str = Field("{question}\n", description="Prompt text; {question} is replaced.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are refused, naming the line.")

    @model_validator(mode="after")
    def _template_has_question(self) -> DataConfig:
        if "{question}" not in self.prompt_template:
            raise ValueError("prompt_template must contain {question}")
        return self


class RolloutConfig(Settings):
    engine: Literal["sglang", "recorded"] = Field(
        "sglang", description="sglang: a real server samples. recorded: replies are read from recorded_dir, no server."
    )
    recorded_dir: Path | None = Field(None, description="The rollouts/ folder of an earlier run (engine: recorded).")
    base_url: str | None = Field(
        None,
        description="Attach to a running server instead of starting one, e.g. http://127.0.0.1:30000; it must see this machine's files.",
    )
    api_key_env: str = Field("MEGATRON_TIM_API_KEY", description="Environment variable with the key of the server at base_url.")
    host: str = Field("127.0.0.1", description="Address the server binds to; loopback unless you mean otherwise.")
    port: int | None = Field(None, ge=1, le=65535, description="Port of the server; a free one when null.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Arithmetic of the server. SGLang's own 'auto' is not offered: it serves float16 for a float32 checkpoint."
    )
    prompts_per_step: int = Field(32, ge=1, description="Prompts sampled per step.")
    samples_per_prompt: int = Field(8, ge=1, description="Responses per prompt: the group of the advantage.")
    max_new_tokens: int = Field(256, ge=1, description="Longest response, in tokens.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; the trainer divides its logits by it too.")
    record_routes: bool = Field(True, description="Record the experts of every token with the trajectories.")
    concurrency: int = Field(64, ge=1, description="Most sequences that run at once, also given to the server.")
    max_total_tokens: int = Field(65536, ge=256, description="Tokens of KV cache of a CPU server (a GPU server sizes its own).")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs (CPU sockets) one server spans.")
    start_timeout_s: float = Field(300, gt=0, description="Longest wait for the server to become ready.")
    request_timeout_s: float = Field(300, gt=0, description="Longest wait for one reply.")
    extra_args: list[str] = Field([], description="More arguments for sglang.launch_server, as words.")
    env: dict[str, str] = Field({}, description="More environment variables for the server.")

    @field_validator("base_url")
    @classmethod
    def _url_has_host(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(f"{url!r} is no address of a server; write one such as http://127.0.0.1:30000")
        return url

    @field_validator("env")
    @classmethod
    def _env_can_be_set(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or "\0" in value:
                raise ValueError(f"{name!r} cannot be set: a name is letters, digits and _, and neither it nor its value holds NUL")
        return env

    @model_validator(mode="after")
    def _source_is_complete(self) -> RolloutConfig:
        if self.engine == "recorded" and self.recorded_dir is None:
            raise ValueError("engine 'recorded' needs recorded_dir, the rollouts/ folder of an earlier run")
        if self.engine == "sglang" and self.recorded_dir is not None:
            raise ValueError("recorded_dir is read only by engine 'recorded'; remove it or set engine")
        return self


class ParallelConfig(Settings):
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks that share each attention layer and the vocabulary.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Stages that the layers are cut into.")
    expert_parallel_size: int = Field(1, ge=1, description="Ranks that the experts of a layer are spread over.")
    expert_tensor_parallel_size: int = Field(1, ge=1, description="Ranks that share each expert.")

    @property
    def min_world_size(self) -> int:
        """The smallest number of processes this layout runs on."""
        experts = self.expert_parallel_size * self.expert_tensor_parallel_size
        return math.lcm(self.tensor_parallel_size, experts) * self.pipeline_parallel_size

    def check_world_size(self, world_size: int) -> None:
        """Refuses a number of processes that this layout does not divide.

        Raises:
            UserError: names the sizes and what would fit.
        """
        for name, size in {
            "tensor_parallel_size x pipeline_parallel_size": self.tensor_parallel_size * self.pipeline_parallel_size,
            "expert_parallel_size x expert_tensor_parallel_size x pipeline_parallel_size": (
                self.expert_parallel_size * self.expert_tensor_parallel_size * self.pipeline_parallel_size
            ),
        }.items():
            if world_size % size:
                raise UserError(
                    f"{world_size} processes do not fit this layout: {name} is {size}, so their number must be a multiple of {size}."
                )


class TrainConfig(Settings):
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Parameters and activations of the trainer; the optimizer keeps float32 masters."
    )
    tokens_per_micro_batch: int = Field(
        16384, ge=1, description="Token budget of one packed micro-batch; the longest sequence where that is longer."
    )
    minibatches_per_rollout: int = Field(1, ge=1, description="Optimizer steps one pass over a rollout batch is cut into.")
    epochs: int = Field(1, ge=1, description="Passes over each rollout batch.")
    recompute: Literal["none", "selective", "full"] = Field("none", description="Activation recomputation.")
    logprob_chunk_tokens: int = Field(1024, ge=1, description="Rows of logits turned into log-probs at a time.")


class OptimizerConfig(Settings):
    lr: float = Field(1e-6, ge=0, description="Constant learning rate of RL.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay (AdamW).")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's decay of the mean gradient.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Adam's decay of the mean squared gradient.")
    eps: float = Field(1e-8, gt=0, description="Adam's term against division by zero.")
    clip_grad: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 does not clip.")


class WarmStartConfig(Settings):
    """Supervised steps before RL, for a model that cannot solve anything yet."""

    max_steps: int = Field(0, ge=0, description="Most supervised steps; 0 turns the warm start off.")
    data: Path | None = Field(None, description="JSONL of worked answers to imitate; data.train when null.")
    target_reward: float = Field(0.2, gt=0, lt=1, description="Stop when sampling would earn this mean reward on held-out problems.")
    check_every: int = Field(10, ge=1, description="Steps between checks of the expected reward.")
    batch_size: int = Field(64, ge=1, description="Problems per step.")
    problems: int = Field(200, ge=1, description="Held-out problems of a check.")
    lr: float = Field(1e-3, gt=0, description="Learning rate of the warm start.")


class EvaluationConfig(Settings):
    every: int = Field(0, ge=0, description="Steps between evaluations; 0 evaluates only before and after.")
    problems: int = Field(200, ge=1, description="Held-out problems, the first ones of data.eval.")


class PreflightConfig(Settings):
    """Before step 1 the trainer scores the server's own tokens; a different model is refused."""

    enabled: bool = Field(True, description="Compare before the first step.")
    prompts: int = Field(64, ge=1, description="Prompts sampled for the comparison.")
    max_mean_abs_diff: float | None = Field(
        None, gt=0, description="Largest mean |difference of log-probs|; by default 0.001 for a float32 server and 0.15 for others."
    )


class Config(Settings):
    """A whole run. `megatron-tim train --config F.yaml run.steps=10 correction.method=tis`."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    correction: CorrectionConfig = CorrectionConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    preflight: PreflightConfig = PreflightConfig()

    @model_validator(mode="after")
    def _correction_fits_loss(self) -> Config:
        check_combination(self.correction, self.loss)
        if self.correction.mode == "bypass":
            for key, given in {
                "loss.shrink_after_rejection = true": self.loss.shrink_after_rejection,
                "advantage.rejected = 'excluded'": self.advantage.rejected == "excluded",
            }.items():
                if given:
                    raise ValueError(
                        f"{key} needs correction.mode = 'recompute': in bypass mode tokens are rejected in each micro-batch, after the"
                        " denominator and the advantages are fixed"
                    )
        if self.loss.kl_coeff > 0:
            raise ValueError(
                f"loss.kl_coeff = {self.loss.kl_coeff:g} needs the log-probs of a reference policy, which the trainer does not hold yet;"
                " set loss.kl_coeff=0 (token_objective takes reference_logprobs in a trainer of your own)"
            )
        return self

    @model_validator(mode="after")
    def _minibatches_fit(self) -> Config:
        if self.train.minibatches_per_rollout > self.rollout.prompts_per_step:
            raise ValueError(
                f"train.minibatches_per_rollout ({self.train.minibatches_per_rollout}) is larger than rollout.prompts_per_step"
                f" ({self.rollout.prompts_per_step}): a minibatch holds whole groups, so at least one prompt each"
            )
        return self


def load_config(path: Path | str, overrides: list[str] = ()) -> Config:
    """Reads a YAML file and applies ``section.key=value`` overrides (values are YAML).

    Raises:
        UserError: one sentence with the key, the value and what is allowed.
    """
    path = Path(path)
    tree = _read_yaml(path)
    for override in overrides:
        _apply_override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {_describe(error)}") from None


def save_config(config: Config, path: Path) -> None:
    """Writes the resolved configuration as YAML."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def changed_keys(path: Path, config: Config) -> list[str]:
    """What ``config`` changes against the one saved at ``path``, as 'key: old -> new'; nothing if none is there."""
    if not path.is_file():
        return []
    old, new = _flat(_read_yaml(path)), _flat(config.model_dump(mode="json"))
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one dictionary of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


class _Loader(yaml.SafeLoader):
    """YAML where a key comes once, and where 012, 1:30, 1_000, yes and 2026-12-01 are text, as people mean them (YAML 1.2)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist; the recipes are in configs/.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} cannot be read: {error}.") from None
    try:
        tree = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"config file {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(tree, dict):
        raise UserError(f"config file {path} must hold sections such as `run:` and `model:`, found {type(tree).__name__}.")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"'{override}' is not an override; write section.key=value, e.g. run.steps=10.")
    *sections, leaf = key.split(".")
    for depth, section in enumerate(sections):
        if tree.get(section) is None:  # absent, or a section with nothing in it
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise UserError(f"'{override}': {'.'.join(sections[: depth + 1])} is a value, not a section.")
    try:
        tree[leaf] = yaml.load(value, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError):
        raise UserError(f"'{override}': the value is not valid YAML; quote it.") from None


def _describe(error: ValidationError) -> str:
    """The first problem as a sentence: key, value, what is allowed."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}'{more}{_suggestion(problem['loc'])}"
    if problem["type"] == "missing":
        return f"key '{key}' is missing{more}."
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    if problem["type"] == "value_error":
        return f"{key + ': ' if key else ''}{message}{more}."
    return f"{describe_problem(problem)}{more}."


def describe_problem(problem: Mapping[str, Any]) -> str:
    """One error of pydantic's as 'key = value is refused: what is allowed'."""
    message = problem["msg"].rstrip(".")
    key = ".".join(str(part) for part in problem["loc"])
    return f"{key} = {problem['input']!r} is refused: {message[0].lower()}{message[1:]}"


def _suggestion(location: tuple[Any, ...]) -> str:
    section: Any = Config
    for part in location[:-1]:
        # A field of a section, or a place in its list or dictionary of sections, whose kind comes last in the annotation.
        section = section.model_fields[part].annotation if hasattr(section, "model_fields") else get_args(section)[-1]
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"; did you mean '{'.'.join([*map(str, location[:-1]), close[0]])}'?" if close else f"; known keys here: {', '.join(known)}."
