"""launch/quickstart.sh: inputs made once, the name of the run, and the command that it becomes."""

from __future__ import annotations

from tests.launch.scripts import Scripts


def command(scripts: Scripts, *arguments: str) -> list[str]:
    """The words given to megatron-tim, after whatever the set-up printed."""
    done = scripts.run("quickstart.sh", *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return lines[lines.index("train") :]


def finish(scripts: Scripts, name: str, folder: str = "runs") -> None:
    path = scripts.root / folder / name
    path.mkdir(parents=True)
    (path / "summary.json").touch()


def test_it_becomes_the_train_command(scripts: Scripts) -> None:
    assert command(scripts, "run.steps=5") == ["train", "--config", "configs/tiny_cpu.yaml", "run.name=quickstart", "run.steps=5"]


def test_inputs_are_made_once(scripts: Scripts) -> None:
    command(scripts)
    made = [call for call in scripts.calls() if call.startswith("tools/")]
    assert made == [
        "tools/make_arithmetic.py --out data/arithmetic",
        "tools/make_tiny_model.py --out models/tiny-qwen3-moe --data data/arithmetic/train.jsonl",
    ]
    command(scripts)
    assert scripts.calls() == []


def test_an_unfinished_run_goes_on_and_a_finished_one_is_followed_by_the_next(scripts: Scripts) -> None:
    (scripts.root / "runs" / "quickstart").mkdir(parents=True)
    assert "run.name=quickstart" in command(scripts)
    (scripts.root / "runs" / "quickstart").rmdir()
    finish(scripts, "quickstart")
    finish(scripts, "quickstart-2")
    assert "run.name=quickstart-3" in command(scripts)


def test_runs_are_looked_for_where_they_are_written(scripts: Scripts) -> None:
    finish(scripts, "quickstart", folder="elsewhere")
    assert "run.name=quickstart-2" in command(scripts, "run.dir=elsewhere")


def test_a_given_name_comes_last_and_wins(scripts: Scripts) -> None:
    assert command(scripts, "run.name=mine")[-1] == "run.name=mine"


def test_values_reach_the_command_unchanged(scripts: Scripts) -> None:
    value = "data.prompt_template=Q: {question} A: $HOME *"
    assert command(scripts, value)[-1] == value


def test_arguments_of_another_form_are_refused_before_anything_is_installed(scripts: Scripts) -> None:
    for argument in ("steps", "--steps=5"):
        done = scripts.run("quickstart.sh", argument)
        assert done.returncode == 1
        assert done.stderr == f"quickstart.sh: error: {argument} is not of the form key=value; see --help.\n"
    assert not (scripts.root / ".venv").exists()


def test_help(scripts: Scripts) -> None:
    done = scripts.run("quickstart.sh", "--help")
    assert done.returncode == 0
    assert "key=value" in done.stdout
