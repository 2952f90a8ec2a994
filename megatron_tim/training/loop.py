"""The main job, as the algorithm: sample, score, correct, step, send the new weights back."""

from __future__ import annotations

from pathlib import Path

from megatron_tim.config import Config
from megatron_tim.correction import AutoLam
from megatron_tim.errors import UserError
from megatron_tim.evaluation.greedy import exact_match_share
from megatron_tim.megatron.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from megatron_tim.megatron.collective import is_main, on_main
from megatron_tim.megatron.trainer import MegatronTrainer
from megatron_tim.rollout.records import from_bytes, to_bytes
from megatron_tim.rollout.source import RecordedSource, RolloutSource, SGLangSource
from megatron_tim.rollout.trajectory import Trajectory
from megatron_tim.training import metric_names as names
from megatron_tim.training.batch import RolloutBatch
from megatron_tim.training.policy import optimize, score_and_correct
from megatron_tim.training.preflight import preflight_metrics, refuse_other_model, run_preflight
from megatron_tim.training.record import RunRecord
from megatron_tim.training.rewards import rollout_metrics, scored
from megatron_tim.training.task import Task
from megatron_tim.training.warm_start import warm_start


def train(config: Config) -> None:
    """Runs the job of ``config`` to its last step, from the newest checkpoint of its run directory if there is one.

    Every rank of a torchrun world calls it; rank 0 holds the engine and the run directory.

    Raises:
        UserError: what the user can mend, in one sentence; checkpoints and records so far are intact.
    """
    task = Task(config.model.hf_path, config.data, config.rollout.prompts_per_step, config.run.seed)
    trainer = MegatronTrainer(config.model.hf_path, config.parallel, config.train, config.run.seed)
    _refuse_long_sequences(task, trainer, config)
    with RunRecord(config, is_main()) as record, _source(config, task, trainer.arch.vocab_size) as source:
        on_main(source.check)
        auto_lam = AutoLam(config.correction.auto_lam) if config.correction.lam == "auto" else None
        done = _restore_or_warm_start(trainer, task, config, record, auto_lam)
        if done and done >= config.run.steps:
            record.console.say("Every step is done; raise run.steps to go on, or choose another run.name.")
            record.finish()
            return
        _start_engine(trainer, source, config, record, done)
        if source.samples_live:
            _compare_engines(trainer, source, task, config, record, done)
        for step in range(done + 1, config.run.steps + 1):
            with record.step(step) as metrics:
                with metrics.phase("rollout"):
                    trajectories = _sample(source, task, step)
                    record.trajectories(step, trajectories)
                    metrics.add(rollout_metrics(trajectories))
                with metrics.phase("score"):
                    correction = auto_lam.resolve(config.correction) if auto_lam else config.correction
                    batch = score_and_correct(trainer, RolloutBatch.from_trajectories(trajectories), config, correction)
                with metrics.phase("train"):
                    metrics.add(optimize(trainer, batch, [t.group for t in trajectories], config, step))
                if auto_lam:
                    metrics.add({names.LAM: auto_lam.lam})
                    auto_lam.update(batch.sums)
                with metrics.phase("sync"):
                    _send_weights(trainer, source, config, step)
                if source.samples_live and _evaluation_is_due(config, step):
                    metrics.add({names.EXACT_MATCH: _evaluate(source, task, config)})
            if step % config.run.save_every == 0 or step == config.run.steps:
                state = {"step": step} | ({"auto_lam": auto_lam.state_dict()} if auto_lam else {})
                save_checkpoint(trainer, _checkpoints(config), state, config.run.keep_checkpoints)
        trainer.save_hf(config.run.path / "hf" / "final")
        record.finish()


def _refuse_long_sequences(task: Task, trainer: MegatronTrainer, config: Config) -> None:
    longest, limit = task.longest_prompt + config.rollout.max_new_tokens, trainer.arch.max_position_embeddings
    if longest > limit:
        raise UserError(
            f"the longest prompt has {task.longest_prompt} tokens, with rollout.max_new_tokens = {config.rollout.max_new_tokens} that is"
            f" {longest}, more than the model's max_position_embeddings = {limit}; lower rollout.max_new_tokens or drop long prompts."
        )


def _source(config: Config, task: Task, vocab_size: int) -> RolloutSource:
    """The engine of rank 0; the other ranks hold the same object and never start it."""
    if config.rollout.engine == "recorded":
        return RecordedSource(config.rollout, vocab_size)
    return SGLangSource(config.rollout, task.codec.eos_id, config.run.path / "sglang.log")


def _restore_or_warm_start(trainer: MegatronTrainer, task: Task, config: Config, record: RunRecord, auto_lam: AutoLam | None) -> int:
    """Brings the trainer to where the run stands and returns the number of RL steps done."""
    checkpoint = latest_checkpoint(_checkpoints(config))
    warm = config.run.path / "hf" / "warm_start"
    if checkpoint is None and config.warm_start.max_steps:
        if on_main(lambda: b"yes" if warm.is_dir() and record.has_same("model.", "data.", "warm_start.", "run.seed") else b"no") == b"yes":
            record.console.say("Warm start: taken over from the earlier start of this run.")
            trainer.load_hf(warm)
        else:
            record.console.say("Warm start: imitating worked answers until a minority would be right.")
            warm_start(trainer, task, config.warm_start, config.optimizer, config.run.seed, record.console)
            trainer.save_hf(warm)
    trainer.new_optimizer(config.optimizer)
    state = load_checkpoint(trainer, checkpoint) if checkpoint else {"step": 0}
    if auto_lam and "auto_lam" in state:
        auto_lam.load_state_dict(state["auto_lam"])
    record.begin(state["step"])
    return state["step"]


def _start_engine(trainer: MegatronTrainer, source: RolloutSource, config: Config, record: RunRecord, done: int) -> None:
    """Starts the engine from the trainer's weights as they are now."""
    folder = _export(trainer, config) if source.samples_live else config.model.hf_path
    # Another seed after a resume, lest the sampler draw the same numbers again.
    on_main(lambda: source.start(folder, done, config.run.seed + done, record.console.progress))


def _compare_engines(trainer: MegatronTrainer, source: RolloutSource, task: Task, config: Config, record: RunRecord, done: int) -> None:
    """Preflight, and the evaluation before the first step."""
    metrics: dict[str, float] = {}
    if config.preflight.enabled:
        prompts = task.prompts(task.held_out[: config.preflight.prompts])
        trajectories = from_bytes(on_main(lambda: to_bytes(source.probe(prompts))))
        result = run_preflight(trainer, trajectories, config.rollout, config.preflight)
        record.preflight(result)
        refuse_other_model(result)
        metrics |= preflight_metrics(result)
    if done == 0:
        metrics[names.EXACT_MATCH] = _evaluate(source, task, config)
        record.write(0, metrics)
        record.console.evaluation(metrics)


def _sample(source: RolloutSource, task: Task, step: int) -> list[Trajectory]:
    """The scored trajectories of a step: sampled on rank 0, the same on every rank."""
    problems = task.problems(step)
    return from_bytes(on_main(lambda: to_bytes(scored(source.sample(step, task.prompts(problems)), problems, task.codec))))


def _evaluate(source: RolloutSource, task: Task, config: Config) -> float:
    problems = task.held_out[: config.evaluation.problems]
    trajectories = from_bytes(on_main(lambda: to_bytes(source.greedy(task.prompts(problems)))))
    return exact_match_share(trajectories, problems, task.codec)


def _send_weights(trainer: MegatronTrainer, source: RolloutSource, config: Config, version: int) -> None:
    if source.samples_live:
        folder = _export(trainer, config)
        on_main(lambda: source.update_weights(folder, version))


def _export(trainer: MegatronTrainer, config: Config) -> Path:
    """Writes the current weights where the engine reads them."""
    folder = config.run.path / "hf" / "rollout"
    trainer.save_hf(folder)
    return folder


def _evaluation_is_due(config: Config, step: int) -> bool:
    return step == config.run.steps or bool(config.evaluation.every) and step % config.evaluation.every == 0


def _checkpoints(config: Config) -> Path:
    return config.run.path / "checkpoints"
