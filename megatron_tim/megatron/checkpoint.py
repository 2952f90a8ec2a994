"""Checkpoints of the trainer: complete or absent, newest kept, exact to continue from.

A checkpoint is a folder ``step_000010`` with Megatron's distributed checkpoint and a ``state.json``
of the run's own state. It is written under another name and renamed when complete, so a kill at any
moment leaves the previous ones usable.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_tim.errors import UserError, space_problem
from megatron_tim.megatron.collective import is_main, new_folder, on_main
from megatron_tim.megatron.model import unwrap
from megatron_tim.megatron.trainer import MegatronTrainer

# What it logs as an error comes back as an exception, and is told from there.
logging.getLogger("megatron.core.dist_checkpointing.strategies.filesystem_async").setLevel(logging.CRITICAL)

_NAME = re.compile(r"step_(\d{6,})")
_STATE = "state.json"


def save_checkpoint(trainer: MegatronTrainer, folder: Path, state: dict[str, Any], keep: int) -> Path:
    """Saves weights, optimizer and ``state`` as ``folder/step_N`` and deletes all but the newest ``keep``. Collective.

    Args:
        trainer: whose weights and optimizer are saved.
        folder: that holds the checkpoints.
        state: of the run itself, as JSON can hold it; ``step`` is N.
        keep: how many checkpoints stay.

    Raises:
        UserError: the folder cannot be written; earlier checkpoints are untouched.
    """
    target = folder / f"step_{state['step']:06d}"
    save_weights(trainer, target, state)
    if is_main():
        _prune(folder, keep)
    return target


def save_weights(trainer: MegatronTrainer, target: Path, state: dict[str, Any] | None = None) -> None:
    """Saves weights, optimizer (if there is one) and ``state`` as the folder ``target``, which appears when complete. Collective.

    Raises:
        UserError: it cannot be written.
    """
    with new_folder(target) as partial:
        try:
            dist_checkpointing.save(_sharded_state(trainer, is_loading=False), str(partial))
        except CheckpointException as failure:  # every rank raises it; rank 0's says which ranks failed and why
            error = failure
            on_main(lambda: _refuse(target, error))
        if is_main():
            (partial / _STATE).write_text(json.dumps((state or {}) | {"parallel": trainer.parallel.model_dump()}), encoding="utf-8")


def _refuse(target: Path, error: CheckpointException) -> None:
    reason = space_problem(error) or str(error).strip().splitlines()[-1]
    raise UserError(f"cannot write {target}: {reason}; free some space or write elsewhere.") from error


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in ``folder``, or None."""
    return next(reversed(_complete(folder)), None)


def _complete(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest first."""
    found = [(_NAME.fullmatch(path.name), path) for path in folder.glob("step_*")]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match and (path / _STATE).is_file())]


def load_checkpoint(trainer: MegatronTrainer, path: Path) -> dict[str, Any]:
    """Restores weights, and the optimizer if the trainer has one, from ``path``; returns the saved ``state``. Collective.

    Raises:
        UserError: the checkpoint is absent, damaged or of another model.
    """
    if not (path / _STATE).is_file():
        raise UserError(f"{path} is not a checkpoint of megatron-tim: it has no {_STATE}; give a step_N folder or one that convert wrote.")
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        _check_layout(trainer, path, state)
        loaded = dist_checkpointing.load(_sharded_state(trainer, is_loading=True), str(path))
        for number, chunk in enumerate(trainer.chunks):
            unwrap(chunk).load_state_dict(loaded[f"model{number}"])
        if trainer.optimizer is not None:
            trainer.optimizer.load_state_dict(loaded["optimizer"])
    except UserError:
        raise
    except (Exception, CheckpointException) as error:  # torch, json and Megatron report damage in types of their own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"checkpoint {path} cannot be loaded ({reason[-1].strip()[:200]}); delete it to continue from the one before."
        ) from error
    return state


def _check_layout(trainer: MegatronTrainer, path: Path, state: dict[str, Any]) -> None:
    """Weights alone fit any layout; the optimizer's state is named by the one it was saved at."""
    saved, here = state.get("parallel", {}), trainer.parallel.model_dump()
    changed = [f"parallel.{key} = {saved[key]}" for key in here if key in saved and saved[key] != here[key]]
    if changed and trainer.optimizer is not None:
        raise UserError(f"checkpoint {path} was saved with {', '.join(changed)}; set that back to resume.")


def _sharded_state(trainer: MegatronTrainer, is_loading: bool) -> dict[str, Any]:
    models = {f"model{number}": unwrap(chunk).sharded_state_dict() for number, chunk in enumerate(trainer.chunks)}
    state: dict[str, Any] = dict(models)
    if trainer.optimizer is not None:
        state["optimizer"] = trainer.optimizer.sharded_state_dict(models["model0"], is_loading=is_loading)
    return state


def _prune(folder: Path, keep: int) -> None:
    """Deletes all but the newest ``keep``, and what a kill left half-written."""
    for path in (*_complete(folder)[:-keep], *folder.glob("step_*.partial")):
        shutil.rmtree(path, ignore_errors=True)
