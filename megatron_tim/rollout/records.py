"""Trajectories as Arrow tables: Parquet files for people and later runs, IPC bytes between ranks.

One row is one trajectory. Every column is a plain scalar or list, apart from the routes, which are
compact bytes: in pandas

    np.frombuffer(row.routed_experts, dtype=row.routed_experts_dtype).reshape(row.routed_experts_shape)

gives [P+R-1, moe_layers, topk]. A list column would take four times the memory once decoded, since
Parquet has no 8-bit integers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_tim.errors import UserError, writing
from megatron_tim.rollout.trajectory import Trajectory, WeightVersionSpan

FORMAT_VERSION = "1"
_VERSION_KEY = b"megatron_tim.trajectories"
_ROUTE_DTYPES = ("uint8", "uint16")
_OPTIONAL = {"reward", "routed_experts", "routed_experts_shape", "routed_experts_dtype"}

SCHEMA = pa.schema(
    [
        ("prompt_index", pa.int64()),
        ("group", pa.int64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.bool_())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("logprob_temperature", pa.float64()),
        ("routed_experts", pa.large_binary()),
        ("routed_experts_shape", pa.list_(pa.int32())),
        ("routed_experts_dtype", pa.string()),
        ("weight_versions", pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))),
        ("finish_reason", pa.string()),
        ("rid", pa.string()),
        ("engine", pa.string()),
        ("reward", pa.float64()),
    ],
    metadata={_VERSION_KEY: FORMAT_VERSION},
)
_SCALARS = ("prompt_index", "group", "logprob_temperature", "finish_reason", "rid", "engine", "reward")
_LISTS = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs")


def to_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """Returns the trajectories as a table with :data:`SCHEMA`, one row each, in order."""
    columns: dict[str, pa.Array] = {
        name: pa.array([getattr(trajectory, name) for trajectory in trajectories], SCHEMA.field(name).type) for name in _SCALARS
    }
    for name in _LISTS:
        columns[name] = _list_column([getattr(trajectory, name) for trajectory in trajectories], SCHEMA.field(name).type)
    routes = [trajectory.routed_experts for trajectory in trajectories]
    columns["routed_experts"] = _each(routes, lambda array: _little_endian(array).tobytes(), "routed_experts")
    columns["routed_experts_shape"] = _each(routes, lambda array: array.shape, "routed_experts_shape")
    columns["routed_experts_dtype"] = _each(routes, lambda array: array.dtype.name, "routed_experts_dtype")
    spans = [[span._asdict() for span in trajectory.weight_versions] for trajectory in trajectories]
    columns["weight_versions"] = pa.array(spans, SCHEMA.field("weight_versions").type)
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def from_table(table: pa.Table, source: str) -> list[Trajectory]:
    """Returns the table's rows as trajectories; ``source`` names the table in errors.

    Raises:
        UserError: a column is missing, has another type or an empty cell, or a row is not a valid trajectory.
    """
    columns = {field.name: _column(table, field, source) for field in SCHEMA}
    values: dict[str, Sequence[Any]] = {name: columns[name].to_pylist() for name in SCHEMA.names if name not in (*_LISTS, "routed_experts")}
    for name in _LISTS:
        values[name] = _split_list_column(columns[name])
    values["routed_experts"] = columns["routed_experts"]
    return [_trajectory(values, row, source) for row in range(table.num_rows)]


def save_trajectories(path: Path | str, trajectories: Sequence[Trajectory]) -> None:
    """Writes the trajectories as one Parquet file (zstd), which appears whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing(path):
            with open(temporary, "wb") as file:
                pq.write_table(to_table(trajectories), file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_trajectories(path: Path | str) -> list[Trajectory]:
    """Reads a file that :func:`save_trajectories` wrote, or one with the same columns.

    Raises:
        UserError: names the file and, where they are known, the column and the row.
    """
    path = Path(path)
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; a run's trajectories are in its rollouts/ folder.") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file ({_one_line(error)}); it may be damaged: sample that step again.") from None
    return from_table(table, str(path))


def to_bytes(trajectories: Sequence[Trajectory]) -> bytes:
    """Serialises trajectories as an Arrow IPC stream, which ranks exchange instead of pickles."""
    sink = pa.BufferOutputStream()
    table = to_table(trajectories)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes | memoryview) -> list[Trajectory]:
    """Reads what :func:`to_bytes` wrote; the arrays are views of ``data`` where possible.

    Raises:
        UserError: the bytes are not such a stream.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            table = reader.read_all()
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"the received trajectories are not an Arrow stream ({_one_line(error)}); all ranks must run the same version."
        ) from None
    return from_table(table, "the received trajectories")


def _each(routes: list[np.ndarray | None], value: Callable[[np.ndarray], Any], column: str) -> pa.Array:
    return pa.array([None if array is None else value(array) for array in routes], SCHEMA.field(column).type)


def _little_endian(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _list_column(arrays: list[np.ndarray], kind: pa.DataType) -> pa.Array:
    """Builds a list column from its concatenated values: 1,000 rows cost one conversion, not 1,000."""
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([array.size for array in arrays], out=offsets[1:])
    flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype=kind.value_type.to_pandas_dtype())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, kind.value_type))


def _split_list_column(column: pa.ListArray) -> list[np.ndarray]:
    flat = column.flatten().to_numpy(zero_copy_only=False)
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths)
    return [flat[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _column(table: pa.Table, field: pa.Field, source: str) -> pa.Array:
    """Returns one column with the type the schema asks for."""
    version = (table.schema.metadata or {}).get(_VERSION_KEY, FORMAT_VERSION.encode()).decode()
    if version != FORMAT_VERSION:
        raise UserError(f"{source} has trajectory format {version}, this version reads {FORMAT_VERSION}; use the version that wrote it.")
    if table.schema.get_field_index(field.name) < 0:
        raise UserError(f"{source} has no column '{field.name}'; trajectory files have {', '.join(SCHEMA.names)}.")
    column = table.column(field.name)
    try:
        column = column.cast(field.type)
    except (pa.ArrowException, ValueError):
        raise UserError(f"{source}: column '{field.name}' has type {column.type}, expected {field.type}.") from None
    combined = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], field.type)
    if field.name not in _OPTIONAL and (row := _first_row_with_null(combined)) is not None:
        raise UserError(f"{source}: column '{field.name}' has an empty value in row {row}.")
    return combined


def _first_row_with_null(column: pa.Array) -> int | None:
    """Returns the first row that is null or, in a list column, holds a null."""
    if column.null_count:
        return column.is_null().index(True).as_py()
    if pa.types.is_list(column.type) and column.flatten().null_count:
        return next(row for row, values in enumerate(column) if values.values.null_count)
    return None


def _trajectory(values: dict[str, Sequence[Any]], row: int, source: str) -> Trajectory:
    fields = {name: values[name][row] for name in (*_SCALARS, *_LISTS)}
    try:
        fields["weight_versions"] = tuple(WeightVersionSpan(**span) for span in values["weight_versions"][row])
        fields["routed_experts"] = _routes(
            values["routed_experts"][row].as_buffer(), values["routed_experts_dtype"][row], values["routed_experts_shape"][row]
        )
        return Trajectory(**fields)
    except ValueError as error:
        raise UserError(f"{source}: row {row}: {_one_line(error)}.") from None


def _routes(buffer: pa.Buffer | None, dtype: str | None, shape: list[int] | None) -> np.ndarray | None:
    if buffer is None:
        return None
    if dtype not in _ROUTE_DTYPES or shape is None or len(shape) != 3:
        kinds = " or ".join(_ROUTE_DTYPES)
        raise ValueError(f"routed_experts needs routed_experts_dtype {kinds} and three sizes, found {dtype} and {shape}")
    kind = np.dtype(dtype).newbyteorder("<")
    expected = kind.itemsize * math.prod(shape)
    if buffer.size != expected:
        raise ValueError(f"routed_experts has {buffer.size} bytes, routed_experts_shape {shape} of {dtype} needs {expected}")
    return np.frombuffer(buffer, dtype=kind).reshape(shape).astype(dtype, copy=False)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
