"""The ``config.json`` of a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_tim.errors import UserError


def read_hf_config(folder: Path | str) -> tuple[Path, dict[str, Any]]:
    """Path and content of ``folder/config.json``.

    Raises:
        UserError: the folder or the file is missing, or it is no JSON object.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist; set model.hf_path to a folder with config.json and safetensors.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"model folder {folder} has no config.json; set model.hf_path to a Hugging Face model folder.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}.") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold a JSON object.")
    return path, raw
