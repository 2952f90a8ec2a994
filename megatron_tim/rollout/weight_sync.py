"""Gives a running server new weights."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_tim.errors import UserError
from megatron_tim.rollout.connection import Connection


def update_weights_from_disk(connection: Connection, path: Path | str, version: int | str) -> None:
    """Loads the weights of the Hugging Face folder ``path``, which the server must see, as ``version``.

    The prefix cache is emptied, as it holds keys, values and routes of the old weights, and the
    version that the server then reports is compared with ``version``.

    Raises:
        UserError: the folder has no weights, the server refuses them, or it reports another version.
    """
    path = Path(path).resolve()
    _check_weights(path)
    body = {"model_path": str(path), "weight_version": str(version), "flush_cache": True}
    reply = connection.post("/update_weights_from_disk", body)
    if not reply.get("success"):
        raise UserError(f"SGLang did not load the weights of {path}: {reply.get('message')}; see the server's log.")
    connection.command("/flush_cache")
    reported = connection.get("/model_info")["weight_version"]
    if reported != str(version):
        raise UserError(f"SGLang reports weight version {reported} after an update to {version}; another client may be updating it.")


def _check_weights(folder: Path) -> None:
    """Opens every file first: SGLang 0.5.23 dies of one that is cut short."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no *.safetensors; export the weights there first.")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                continue
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is not a whole safetensors file ({error}); export the weights again.") from None
