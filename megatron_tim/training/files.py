"""Writes that happen whole or not at all, whatever the disk does meanwhile."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_tim.errors import UserError, writing


def append_whole(path: Path, data: bytes) -> None:
    """Appends ``data`` and waits for the disk; when that fails, the file keeps its former length.

    Raises:
        UserError: the disk is full or the file may not be written.
    """
    # Unbuffered: a buffered file would keep the rejected bytes and try to write them again when it is closed.
    with writing(path), open(path, "ab", buffering=0) as file:
        length = file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(length)
            raise


def replace_whole(path: Path, data: bytes) -> None:
    """Writes ``data`` under a temporary name and renames it to ``path``; when that fails, ``path`` is untouched.

    Raises:
        UserError: the disk is full or the file may not be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def drop_torn_line(path: Path) -> int:
    """Cuts off what follows the last newline, the trace of a kill or a power cut during a write; returns its bytes."""
    if not path.exists():
        return 0
    with writing(path), open(path, "r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)
        return len(data) - whole


def read_json_lines(path: Path, key: str) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, each with ``key``, without a torn last line; no file gives no objects.

    Raises:
        UserError: the file cannot be read, or a whole line is not a JSON object with ``key`` (names the line).
    """
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from None
    rows = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or key not in row:
            raise UserError(f"{path}, line {number} is damaged: it is not a JSON object with '{key}'; remove the line and try again.")
        rows.append(row)
    return rows


def to_json(row: Mapping[str, Any], indent: int | None = None) -> bytes:
    """One JSON object with a final newline; NaN and infinities, which JSON lacks, become null and are named under ``nonfinite``."""
    nonfinite: list[str] = []
    clean = {key: _finite(value, key, nonfinite) for key, value in row.items()}
    if nonfinite:
        clean["nonfinite"] = nonfinite
    return json.dumps(clean, indent=indent, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _finite(value: Any, name: str, nonfinite: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner, f"{name}.{key}", nonfinite) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner, f"{name}.{place}", nonfinite) for place, inner in enumerate(value)]
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, Path):
        return str(value)
    number = float(value)
    if not math.isfinite(number):
        nonfinite.append(name)
        return None
    return number
