"""megatron-tim convert: Hugging Face weights to a Megatron checkpoint and back, and the proof that they are the same model."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tim.cli.arguments import positive_int, tolerance
from megatron_tim.errors import UserError

if TYPE_CHECKING:
    from megatron_tim.config import ParallelConfig

EXAMPLE = """examples:
  megatron-tim convert --hf models/tiny-qwen3-moe --check --json
  megatron-tim convert --hf models/Qwen3-30B-A3B --to-megatron checkpoints/qwen3 --expert-parallel-size 8
  megatron-tim convert --hf models/Qwen3-30B-A3B --from-megatron runs/NAME/checkpoints/step_000100 --to-hf exported
"""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Adds the subcommand to the parser of ``megatron-tim``."""
    parser = subparsers.add_parser(
        "convert",
        help="convert weights between Hugging Face and Megatron, and check them",
        description="Builds the Megatron model of a Hugging Face folder and converts or checks its weights.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hf", required=True, type=Path, metavar="DIR", help="Hugging Face folder: config.json, tokenizer, safetensors")
    parser.add_argument("--check", action="store_true", help="compare the logits with transformers' in float32; fails above --tolerance")
    parser.add_argument("--tolerance", type=tolerance, default=1e-4, help="largest logit difference that passes (default: %(default)s)")
    parser.add_argument("--to-megatron", type=Path, metavar="DIR", help="write a Megatron distributed checkpoint")
    parser.add_argument(
        "--from-megatron", type=Path, metavar="DIR", help="read weights from a Megatron checkpoint (one of a run, or --to-megatron)"
    )
    parser.add_argument("--to-hf", type=Path, metavar="DIR", help="write a Hugging Face folder")
    for name in ("tensor", "pipeline", "expert", "expert-tensor"):
        parser.add_argument(f"--{name}-parallel-size", type=positive_int, default=1, metavar="N")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    if not (args.check or args.to_megatron or args.to_hf):
        raise UserError("nothing to do: give --check, --to-megatron DIR or --to-hf DIR.")
    if not args.hf.is_dir():
        raise UserError(f"--hf {args.hf} is not a folder; give a Hugging Face model folder.")
    for flag, path in (("--to-megatron", args.to_megatron), ("--to-hf", args.to_hf)):
        if path is not None and path.exists():
            raise UserError(f"{flag} {path} exists already; give a new folder.")
    from megatron_tim.cli.processes import exit_as_one, quiet_libraries, run_workers, stop_on_sigterm

    parallel = _parallel(args)
    if "RANK" not in os.environ and parallel.min_world_size > 1:
        return run_workers(parallel.min_world_size, _command(args))
    stop_on_sigterm()
    quiet_libraries()
    with exit_as_one():
        from megatron_tim.megatron.platform import init_process_group

        init_process_group()  # first of all, so that ranks that fail can agree on who tells
        return _convert(args, parallel)


def _convert(args: argparse.Namespace, parallel: ParallelConfig) -> int:
    from megatron_tim.config import TrainConfig
    from megatron_tim.megatron.architecture import TORCH_DTYPE
    from megatron_tim.megatron.checkpoint import load_checkpoint, save_weights
    from megatron_tim.megatron.collective import is_main
    from megatron_tim.megatron.hf_weights import stored_dtype
    from megatron_tim.megatron.trainer import MegatronTrainer

    stored = stored_dtype(args.hf)
    # The check is made in float32; widening bfloat16 weights and narrowing them again gives the same bits.
    trainer = MegatronTrainer(args.hf, parallel, TrainConfig(dtype="float32" if args.check else stored), seed=1)
    if args.from_megatron:
        load_checkpoint(trainer, args.from_megatron)
    result: dict[str, object] = {"hf": str(args.hf)}
    if args.check:
        from megatron_tim.megatron.compare import max_logit_difference

        result["max_logit_diff"] = max_logit_difference(trainer)
        result["passed"] = result["max_logit_diff"] <= args.tolerance
    if args.to_megatron:
        save_weights(trainer, args.to_megatron)
        result["megatron"] = str(args.to_megatron)
    if args.to_hf:
        trainer.save_hf(args.to_hf, TORCH_DTYPE[stored])
        result["exported"] = str(args.to_hf)
    if is_main():
        print(json.dumps(result) if args.json else "\n".join(f"{key}: {value}" for key, value in result.items()))
    return 0 if result.get("passed", True) else 1


def _parallel(args: argparse.Namespace) -> ParallelConfig:
    from megatron_tim.config import ParallelConfig  # here, for it imports torch, which --help does not need

    return ParallelConfig(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        expert_parallel_size=args.expert_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )


def _command(args: argparse.Namespace) -> list[str]:
    """The same command line for the workers."""
    words = ["convert", "--hf", str(args.hf), "--tolerance", str(args.tolerance)]
    for name in ("to_megatron", "from_megatron", "to_hf"):
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    for name in ("tensor", "pipeline", "expert", "expert_tensor"):
        words += [f"--{name.replace('_', '-')}-parallel-size", str(getattr(args, f"{name}_parallel_size"))]
    return words + [f"--{name}" for name in ("check", "json") if getattr(args, name)]
