"""Configuration: read, overridden, saved, compared; wrong ones refused in a sentence that names key and value."""

import pytest
import yaml

from megatron_tim.config import changed_keys, load_config, save_config
from megatron_tim.errors import UserError

RECIPE = "configs/tiny_cpu.yaml"


def test_overrides_replace_values_and_keep_the_rest():
    config = load_config(RECIPE, ["run.steps=7", "optimizer.lr=1e-5", "rollout.port=null", "train.dtype=bfloat16"])
    assert config.run.steps == 7 and config.optimizer.lr == 1e-5 and config.rollout.port is None and config.train.dtype == "bfloat16"
    assert config.rollout.prompts_per_step == load_config(RECIPE).rollout.prompts_per_step


def test_a_saved_configuration_reads_back_the_same(tmp_path):
    config = load_config(RECIPE, ['rollout.extra_args=["--schedule-policy", "lpm"]'])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert changed_keys(tmp_path / "config.yaml", config) == []
    other = load_config(RECIPE, ["correction.method=tis", 'rollout.extra_args=["--schedule-policy", "lpm"]'])
    assert changed_keys(tmp_path / "config.yaml", other) == ["correction.method: cis -> tis"]
    assert changed_keys(tmp_path / "absent.yaml", other) == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.stepz=1", "unknown key 'run.stepz'; did you mean 'run.steps'?"),
        ("nothing.like=1", "unknown key 'nothing'"),
        ("run.name=a/b", "run.name = 'a/b' is refused"),
        ("run.steps=-1", "run.steps = -1 is refused"),
        ("optimizer.lr=nan", "optimizer.lr"),
        ("rollout.temperature=-0.5", "rollout.temperature = -0.5 is refused"),
        ("correction.method=best", "correction.method = 'best' is refused"),
        ("correction.lam=-1", "correction.lam: lam = -1 is negative; a cap of 1 + lam * (1 - p) needs lam >= 0, or 'auto'"),
        ("correction.lam=abc", "correction.lam: lam = 'abc' is neither a number nor 'auto'"),
        ("correction.reject=[{rule: k3, hihg: 2}]", "unknown key 'correction.reject.0.hihg'; did you mean 'correction.reject.0.high'?"),
        ("correction.reject=k3", "correction.reject = 'k3' is refused: input should be a valid list"),
        ("correction.reject=[k4]", "correction.reject.0: 'k4' is no rejection rule; allowed: k1, k2, k3, geo_rs, veto"),
        ("correction.shadows={a: {metod: tis}}", "unknown key 'correction.shadows.a.metod'; did you mean 'correction.shadows.a.method'?"),
        ("correction.shadows=[{method: tis}]", "is no preset's name; a list holds presets"),
        ("correction.shadows=tis", "correction.shadows = 'tis' is refused"),
        ("correction.preset=best", "'best' is no preset; allowed: none, exact, tis"),
        ("correction.auto_lam.start=900", "start = 900 is not between low = 0.1 and high = 20"),
        ("rollout.engine=recorded", "needs recorded_dir"),
        ("rollout.recorded_dir=here", "recorded_dir is read only by engine 'recorded'"),
        ("train.minibatches_per_rollout=65", "train.minibatches_per_rollout (65) is larger than rollout.prompts_per_step (64)"),
        ("data.prompt_template=hello", "prompt_template must contain {question}"),
        ("run=5", "run = 5 is refused"),
        ("run.steps.more=5", "run.steps is a value, not a section"),
        ("=5", "'=5' is not an override"),
        ("run.steps={", "the value is not valid YAML"),
        ("run.steps=true", "run.steps: true is no value for it; allowed: a whole number"),
        ("optimizer.lr=true", "optimizer.lr: true is no value for it; allowed: a number"),
        ("rollout.port=false", "rollout.port: false is no value for it"),
        ("correction.lam=true", "correction.lam: true is no value for it"),
        ("run.seed=1:30", "run.seed = '1:30' is refused"),
        ("run.name=01/2", "run.name = '01/2' is refused"),
        ('run.dir="a\\0b"', "run.dir: it holds a NUL character"),
        ("rollout.base_url=foo", "'foo' is no address of a server"),
        ("rollout.base_url=http://", "'http://' is no address of a server"),
        ("rollout.base_url=http://host:99999", "is no address of a server"),
        ('rollout.env={"A=B": "1"}', "'A=B' cannot be set"),
        ("run={steps: 1, steps: 2}", "the value is not valid YAML"),
    ],
)
def test_a_wrong_override_is_named(override, words):
    with pytest.raises(UserError) as refusal:
        load_config(RECIPE, [override])
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["012", "1_000", "2026-12-01", "yes"])
def test_a_name_that_looks_like_a_number_stays_as_it_is_written(name):
    assert load_config(RECIPE, [f"run.name={name}"]).run.name == name


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "0.00001", ".1e-4", "1.e-5", "+1.0e-5"])
def test_small_numbers_in_every_notation(text):
    assert load_config(RECIPE, [f"optimizer.lr={text}"]).optimizer.lr == pytest.approx(1e-5, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b", "must hold sections"),
        ("a: [", "is not valid YAML"),
        ("run: {name: x}\nrun: {name: y}", "key 'run' is given twice"),
        ("run: {name: x, steps: 1, name: y}", "key 'name' is given twice"),
        ("a: " + "[" * 3000, "is not valid YAML"),
        ("run: {name: x}", "key 'run.steps' is missing"),
        ("", "must hold sections"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, words):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match="c.yaml") as refusal:
        load_config(tmp_path / "c.yaml")
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_config(tmp_path / "absent.yaml")


def test_layouts_and_processes():
    parallel = load_config(RECIPE, ["parallel.expert_parallel_size=4", "parallel.pipeline_parallel_size=2"]).parallel
    assert parallel.min_world_size == 8
    parallel.check_world_size(16)
    with pytest.raises(UserError, match="4 processes do not fit"):
        parallel.check_world_size(4)


def test_every_recipe_is_valid():
    from pathlib import Path

    recipes = sorted(Path("configs").rglob("*.yaml"))
    assert recipes
    for recipe in recipes:
        assert yaml.safe_load(recipe.read_text())
        load_config(recipe)
