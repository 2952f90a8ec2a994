"""Trajectories survive Parquet and IPC bit for bit, and a damaged or foreign file is named with its fault."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import duckdb
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_tim.errors import UserError
from megatron_tim.rollout.records import SCHEMA, from_bytes, load_trajectories, save_trajectories, to_bytes, to_table
from megatron_tim.rollout.trajectory import Trajectory
from tests.rollout.examples import assert_same, make_trajectory, trajectories


@given(st.lists(trajectories(), max_size=4))
@settings(max_examples=50, deadline=None)
def test_bytes_round_trip(originals: list[Trajectory]) -> None:
    copies = from_bytes(to_bytes(originals))
    assert len(copies) == len(originals)
    for original, copy in zip(originals, copies, strict=True):
        assert_same(original, copy)


@given(st.lists(trajectories(), max_size=4))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_file_round_trip(tmp_path: Path, originals: list[Trajectory]) -> None:
    save_trajectories(tmp_path / "t.parquet", originals)
    copies = load_trajectories(tmp_path / "t.parquet")
    assert len(copies) == len(originals)
    for original, copy in zip(originals, copies, strict=True):
        assert_same(original, copy)
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step_000001.parquet"
    save_trajectories(path, [make_trajectory(3, 4, seed) for seed in range(3)] + [make_trajectory(seed=3, routed_experts=None, reward=1.0)])
    return path


def test_pandas_reads_every_column(file: Path) -> None:
    frame = pandas.read_parquet(file)
    for number, row in enumerate(frame.itertuples()):
        original = load_trajectories(file)[number]
        np.testing.assert_array_equal(row.response_ids, original.response_ids)
        np.testing.assert_array_equal(row.rollout_logprobs, original.rollout_logprobs)
        assert list(row.weight_versions) == [{"version": "0", "start": 0, "end": 4}]
        if original.routed_experts is None:
            assert row.routed_experts is None
        else:
            routes = np.frombuffer(row.routed_experts, dtype=row.routed_experts_dtype).reshape(row.routed_experts_shape)
            np.testing.assert_array_equal(routes, original.routed_experts)


def test_duckdb_reads_the_file(file: Path) -> None:
    columns = "sum(len(response_ids)), min(list_min(rollout_logprobs)), count(routed_experts), any_value(weight_versions[1].version)"
    tokens, least, routed, version = duckdb.sql(f"select {columns} from '{file}'").fetchall()[0]
    assert (tokens, routed, version) == (16, 3, "0")
    assert least == pytest.approx(min(t.rollout_logprobs.min() for t in load_trajectories(file)))


def test_a_file_written_by_another_program_is_read(file: Path, tmp_path: Path) -> None:
    """DuckDB drops the metadata of the file: the columns alone decide."""
    duckdb.sql(f"copy (select * from '{file}' where reward is not null) to '{tmp_path}/other.parquet'")
    (only,) = load_trajectories(tmp_path / "other.parquet")
    assert_same(only, load_trajectories(file)[3])


def _rewrite(file: Path, column: str, values: pa.Array | None) -> None:
    table = pq.read_table(file)
    position = table.schema.get_field_index(column)
    table = table.remove_column(position) if values is None else table.set_column(position, column, values)
    pq.write_table(table, file)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("rollout_logprobs", None, "has no column 'rollout_logprobs'"),
        ("prompt_ids", pa.array(["a"] * 4), "column 'prompt_ids' has type string"),
        ("group", pa.array([0, 1, None, 3]), "column 'group' has an empty value in row 2"),
        ("prompt_ids", pa.array([[1], [2], [3], None]), "column 'prompt_ids' has an empty value in row 3"),
        ("rollout_logprobs", pa.array([[-1.0], [-1.0, None], [-1.0], [-1.0]]), "'rollout_logprobs' has an empty value in row 1"),
        ("response_mask", pa.array([[True] * 4, [True] * 4, [True] * 3, [True] * 4]), "row 2: response_mask has 3 entries"),
        ("routed_experts", pa.array([b"x", b"", None, None]), "row 0: routed_experts has 1 bytes"),
        ("routed_experts_dtype", pa.array(["object"] * 4), "row 0: routed_experts needs routed_experts_dtype"),
        ("routed_experts_shape", pa.array([None] * 4, pa.list_(pa.int32())), "row 0: routed_experts needs .* three sizes"),
        ("logprob_temperature", pa.array([1.0, -1.0, 1.0, 1.0]), "row 1: logprob_temperature must be positive"),
    ],
)
def test_names_the_file_column_and_row(file: Path, column: str, values: pa.Array | None, message: str) -> None:
    _rewrite(file, column, values)
    with pytest.raises(UserError, match=message) as caught:
        load_trajectories(file)
    assert str(file) in str(caught.value)


def test_damaged_missing_and_newer_files(file: Path, tmp_path: Path) -> None:
    pq.write_table(to_table([make_trajectory()]).replace_schema_metadata({b"megatron_tim.trajectories": b"99"}), tmp_path / "new.parquet")
    with pytest.raises(UserError, match="format 99"):
        load_trajectories(tmp_path / "new.parquet")
    with pytest.raises(UserError, match="does not exist"):
        load_trajectories(tmp_path / "absent.parquet")
    data = file.read_bytes()
    for damaged in (b"", b"hello", data[: len(data) // 2], data[:200] + bytes(200) + data[400:]):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=str(file)):
            load_trajectories(file)
    for damaged in (b"", b"hello", to_bytes([make_trajectory()])[:100]):
        with pytest.raises(UserError, match="not an Arrow stream"):
            from_bytes(damaged)


_FILL_THE_DISK = """
import resource, sys
from megatron_tim.errors import UserError
from megatron_tim.rollout.records import save_trajectories
from tests.rollout.examples import make_trajectory
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
try:
    save_trajectories(sys.argv[1], [make_trajectory(seed=9)] * 3)
except UserError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_file(file: Path) -> None:
    before = file.read_bytes()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", _FILL_THE_DISK, str(file)], capture_output=True, text=True, check=True)
    assert f"cannot write {file}: the file size limit was reached" in done.stdout
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_schema_is_the_dataclass() -> None:
    assert set(SCHEMA.names) - {"routed_experts_shape", "routed_experts_dtype"} == set(Trajectory.__dataclass_fields__)
