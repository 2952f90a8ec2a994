"""megatron-tim train: the main job, under torchrun or starting its own processes."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from megatron_tim.cli.arguments import positive_int
from megatron_tim.errors import UserError

if TYPE_CHECKING:
    from megatron_tim.config import Config

EXAMPLE = """examples:
  megatron-tim train --config configs/tiny_cpu.yaml
  megatron-tim train --config configs/tiny_cpu.yaml run.name=tis correction.method=tis optimizer.lr=1e-4
  torchrun --nproc-per-node 8 -m megatron_tim train --config F.yaml
"""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Adds the subcommand to the parser of ``megatron-tim``."""
    parser = subparsers.add_parser(
        "train",
        help="train a model by RL: sample, correct, step, send the weights back",
        description="Runs or resumes the job of a config. Outside torchrun it starts the processes of one machine itself.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="F.yaml", help="the recipe; see configs/")
    parser.add_argument(
        "--nproc-per-node", type=positive_int, metavar="N", help="processes to start (default: the GPUs, or the fewest that fit)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace those of the file")
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    from megatron_tim.config import load_config  # here, for it imports torch, which --help does not need

    config = load_config(args.config, args.overrides)
    if "RANK" in os.environ:
        return _work(config)
    _check_paths(config)
    from megatron_tim.cli.processes import default_processes, run_workers

    processes = args.nproc_per_node or default_processes(config.parallel)
    config.parallel.check_world_size(processes)
    return run_workers(processes, ["train", "--config", args.config, *args.overrides])


def _work(config: Config) -> int:
    from megatron_tim.cli.processes import exit_as_one, quiet_libraries, stop_on_sigterm

    stop_on_sigterm()
    quiet_libraries()
    with exit_as_one():
        from megatron_tim.megatron.platform import init_process_group
        from megatron_tim.training.loop import train

        init_process_group()  # first of all, so that ranks that fail can agree on who tells
        train(config)
    return 0


def _check_paths(config: Config) -> None:
    """Refuses missing inputs before any process starts."""
    if not config.model.hf_path.is_dir():
        raise UserError(
            f"model.hf_path = {config.model.hf_path} is not a folder; download the model, or make the tiny one with launch/quickstart.sh."
        )
    for key in ("train", "eval"):
        path = getattr(config.data, key)
        if not path.is_file():
            raise UserError(
                f"data.{key} = {path} is not a file; download the data, or make the arithmetic problems with launch/quickstart.sh."
            )
