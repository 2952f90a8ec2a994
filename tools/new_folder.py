"""A folder that appears complete or not at all: the makers in this folder write through it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_tim.errors import UserError, writing


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder beside ``path`` that is renamed to ``path`` on success and removed otherwise.

    Raises:
        UserError: ``path`` exists already or cannot be written.
    """
    _require_absent(path)
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    with writing(path):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            _require_absent(path)
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _require_absent(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path} exists already; remove it or choose another --out.")
