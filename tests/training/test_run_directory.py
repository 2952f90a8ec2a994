"""The run directory survives kills, full disks, two writers and NaN."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_tim.errors import UserError
from megatron_tim.training.files import append_whole, read_json_lines, replace_whole, to_json
from megatron_tim.training.run_directory import RunDirectory

REPOSITORY = Path(__file__).parents[2]

# A private mount namespace: a tiny real file system that nothing outside the test sees and that goes away with it.
TMPFS = ["unshare", "--mount", "--map-root-user", "sh", "-c", 'mount -t tmpfs -o size=64k,nr_inodes=64 none "$0" && exec "$@"']

FILL = """
import sys
from megatron_tim.errors import UserError
from megatron_tim.training.run_directory import RunDirectory
with RunDirectory(sys.argv[1] + "/run", tensorboard=sys.argv[2] == "on") as run:
    try:
        for step in range(1, 10_000):
            run.log_metrics(step, {f"metric_{i}": step / 3 for i in range(40)})
    except UserError as error:
        rows = run.metrics()
        print(step, len(rows), run.metrics_path.read_bytes().endswith(b"\\n"))
        try:
            run.write_summary({"text": "x" * 100_000})
        except UserError:
            print(sorted(path.name for path in run.path.iterdir() if path.is_file()))
        sys.exit(str(error))
"""


def fill(prefix, folder, tensorboard):
    command = [*prefix, sys.executable, "-c", FILL, str(folder), tensorboard]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)


def can_mount_tmpfs() -> bool:
    return bool(shutil.which("unshare")) and not subprocess.run([*TMPFS, "/mnt", "true"], capture_output=True).returncode


LIMITED = ["sh", "-c", 'ulimit -f 40; exec "$0" "$@"']
DISKS = {"file size limit": LIMITED} | ({"tmpfs": TMPFS} if can_mount_tmpfs() else {})


@pytest.mark.parametrize("tensorboard", ["on", "off"])
@pytest.mark.parametrize("disk", DISKS)
def test_a_full_disk_is_one_sentence_and_no_half_line(tmp_path, disk, tensorboard):
    prefix = [*TMPFS, str(tmp_path)] if disk == "tmpfs" else LIMITED
    result = fill(prefix, tmp_path, tensorboard)
    assert result.returncode == 1
    assert result.stderr.startswith(f"cannot write {tmp_path}/run/") and result.stderr.count("\n") == 1
    assert {"tmpfs": "the disk is full", "file size limit": "the file size limit was reached"}[disk] in result.stderr
    rows, files = result.stdout.splitlines()
    step, whole_rows, ends_in_newline = rows.split()
    assert int(step) > 3 and ends_in_newline == "True"
    # The row comes first: when it was TensorBoard's file that did not fit, the row of that step is there.
    assert int(whole_rows) in ((int(step) - 1, int(step)) if tensorboard == "on" else (int(step) - 1,))
    assert files == "['.lock', 'metrics.jsonl']"


def test_layout(tmp_path):
    with RunDirectory(tmp_path / "runs" / "a") as run:
        assert run.metrics() == []
        assert run.rollout_path(1) == tmp_path / "runs" / "a" / "rollouts" / "step_000001.parquet"
        assert all(folder.is_dir() for folder in (run.rollouts, run.checkpoints, run.hf, run.tensorboard))
    with RunDirectory(tmp_path / "b", tensorboard=False) as run:
        run.log_metrics(1, {"reward_mean": 0.5})
        assert not run.tensorboard.exists()


def test_rows_come_back(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.log_metrics(1, {"reward_mean": 0.5, "tokens": 12})
        run.log_metrics(2, {"grad_norm": math.nan, "rollout_corr/max_ratio": math.inf, "reward_mean": 0.25})
    rows = RunDirectory(tmp_path).metrics()
    assert rows[0] == {"step": 1, "reward_mean": 0.5, "tokens": 12}
    assert rows[1] == {
        "step": 2,
        "grad_norm": None,
        "rollout_corr/max_ratio": None,
        "reward_mean": 0.25,
        "nonfinite": ["grad_norm", "rollout_corr/max_ratio"],
    }


def test_steps_only_go_forward(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.log_metrics(3, {})
        with pytest.raises(ValueError, match="step 3 after those of step 3"):
            run.log_metrics(3, {})


@given(lines=st.integers(0, 4), cut=st.integers(0, 40))
def test_a_torn_last_line_is_dropped(tmp_path_factory, lines, cut):
    folder = tmp_path_factory.mktemp("run")
    with RunDirectory(folder, tensorboard=False) as run:
        for step in range(1, lines + 1):
            run.log_metrics(step, {"reward_mean": 0.5})
    line = to_json({"step": lines + 1, "reward_mean": 0.123456789})
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(line[: min(cut, len(line) - 1)])
    with RunDirectory(folder, tensorboard=False) as run:
        assert [row["step"] for row in run.metrics()] == list(range(1, lines + 1))
        run.log_metrics(lines + 1, {"reward_mean": 1.0})
        assert run.metrics()[-1] == {"step": lines + 1, "reward_mean": 1.0}
        events = read_json_lines(run.history_path, key="event")
        assert [event["bytes"] for event in events] == ([min(cut, len(line) - 1)] if cut else [])


@pytest.mark.parametrize("line", [b"{oops\n", b"3\n", b'{"reward_mean": 1}\n', b"\0\0\n"])
def test_a_damaged_whole_line_is_named_and_the_lock_let_go(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line)
    for _ in range(2):
        with pytest.raises(UserError, match="metrics.jsonl, line 2 is damaged"):
            RunDirectory(tmp_path)


def test_resume_forgets_what_came_later(tmp_path):
    with RunDirectory(tmp_path) as run:
        for step in range(1, 6):
            run.log_metrics(step, {"reward_mean": float(step), "grad_norm": math.nan})
        run.write_summary({"steps": 5, "kl": math.inf})
        assert json.loads(run.summary_path.read_text()) == {"steps": 5, "kl": None, "nonfinite": ["kl"]}
    with RunDirectory(tmp_path) as run:
        run.truncate_after(3)
        assert [row["step"] for row in run.metrics()] == [1, 2, 3]
        assert run.metrics()[0]["nonfinite"] == ["grad_norm"]
        assert not run.summary_path.exists()
        for step in (4, 5):
            run.log_metrics(step, {"reward_mean": 10.0 * step})
    curves = EventAccumulator(str(run.tensorboard)).Reload()
    assert [(event.step, event.value) for event in curves.Scalars("reward_mean")] == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50)]


def test_truncating_to_the_start(tmp_path):
    with RunDirectory(tmp_path, tensorboard=False) as run:
        for _ in range(2):
            run.truncate_after(0)
            assert run.metrics() == []
            run.log_metrics(0, {})
            run.log_metrics(1, {})
        run.truncate_after(1)
        assert [row["step"] for row in run.metrics()] == [0, 1]


def test_history(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.record("start", steps=10)
        run.record("resume", step=4, changed={"run.steps": [10, 20]})
        start, resume = read_json_lines(run.history_path, key="event")
    assert start["event"] == "start" and start["time"].endswith("+00:00")
    assert resume["step"] == 4 and resume["changed"] == {"run.steps": [10, 20]}


def test_two_writers_are_refused(tmp_path):
    with RunDirectory(tmp_path), pytest.raises(UserError, match=f"is being written by process {os.getpid()} on "):
        RunDirectory(tmp_path)
    RunDirectory(tmp_path).close()


def test_a_killed_writer_leaves_no_lock(tmp_path):
    code = (
        f"import os; from megatron_tim.training.run_directory import RunDirectory as R; r = R({str(tmp_path)!r}); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == -9
    RunDirectory(tmp_path).close()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match="a file is in its place"):
        RunDirectory(tmp_path / "runs")
    with pytest.raises(UserError, match="a file is in its place"):
        RunDirectory(tmp_path / "runs" / "a")
    with pytest.raises(UserError, match="cannot write .*: file name too long"):
        RunDirectory(tmp_path / ("a" * 300))
    with pytest.raises(UserError, match="cannot be locked|cannot write"):
        RunDirectory("/proc/self")


def test_without_tensorboard_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with RunDirectory(tmp_path) as run, pytest.raises(UserError, match="run.tensorboard=false"):
        run.log_metrics(1, {})


def test_replace_is_whole(tmp_path):
    path = tmp_path / "file"
    replace_whole(path, b"one")
    append_whole(path, b" two")
    assert path.read_bytes() == b"one two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=6
)


@given(st.dictionaries(st.text().filter(lambda key: key != "nonfinite"), VALUES, max_size=5))
def test_any_row_is_one_line_of_valid_json(row):
    line = to_json(row)
    assert line.count(b"\n") == 1

    def refuse(constant):
        raise AssertionError(constant)

    read = json.loads(line, parse_constant=refuse)
    read.pop("nonfinite", None)
    assert read.keys() == row.keys()
    for key, value in row.items():
        if not isinstance(value, (list, float)) or isinstance(value, float) and math.isfinite(value):
            assert read[key] == value
