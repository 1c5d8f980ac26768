"""A training run from a recipe: data, model, optimizer, the loop, evaluation, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Container
from pathlib import Path
from typing import Any

import paddle

import vha_paddle
from vha_paddle.checkpoint.layout import METRICS_FILE, Checkpoint, RunState, step_directory
from vha_paddle.checkpoint.load import load_optimizer, load_parameters, router_state
from vha_paddle.checkpoint.retention import last_good_step, set_aside
from vha_paddle.checkpoint.save import CheckpointSaver, Router
from vha_paddle.config import Recipe
from vha_paddle.errors import RunError, UserError
from vha_paddle.evaluate import validation_loss
from vha_paddle.model.pipelined import build_model
from vha_paddle.parallel.agreement import check_agreement, together
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.precision.policy import check_fp8
from vha_paddle.train.changes import changed_keys
from vha_paddle.train.data import RunData
from vha_paddle.train.maps import measure_maps
from vha_paddle.train.metrics import RunLog, write_resolved_recipe
from vha_paddle.train.optimizer import Optimizer
from vha_paddle.train.phases import Phases
from vha_paddle.train.resume import checkpoint_to_continue
from vha_paddle.train.run_directory import run_directory
from vha_paddle.train.saves import Saves
from vha_paddle.train.schedule import learning_rate
from vha_paddle.train.skips import Skips
from vha_paddle.train.start import start_from
from vha_paddle.train.step import train_step
from vha_paddle.train.usage import Usage, peaks_of

MOST_UNSAVED_STEPS = 1000
"""Of a run without checkpoints on the way, that its opening lines do not warn of."""


class Trainer:
    """Runs a recipe on this process's part of the mesh; every rank holds one."""

    def __init__(
        self,
        recipe: Recipe,
        data: RunData,
        mesh: Mesh,
        phases: Phases | None = None,
        allow_changed: Collection[str] = (),
    ) -> None:
        """Build the model and continue from the newest whole checkpoint where the recipe says so.

        Args:
            allow_changed: keys that may differ from the checkpoint's recipe though they change what is trained.

        Raises:
            UserError: the device lacks the recipe's precision, or an earlier run in `run.output` does not fit.
        """
        self.recipe, self.data, self.mesh, self.phases = recipe, data, mesh, phases or Phases()
        self.output = Path(recipe.run.output)
        check_precision(recipe)
        data.check_ranks(mesh)
        self.model = build_model(recipe, mesh, recipe.precision.compute)
        self.optimizer = Optimizer(self.model.parameters(), recipe, mesh)
        self._saver = CheckpointSaver(self.output, recipe, Path(recipe.data.tokenizer), mesh)
        self.optimizer.before_update = self._saver.wait_for_copy
        self._rows = data.rows_of(mesh)
        self._usage = Usage(mesh)
        self.step = 0
        self._skips = Skips(recipe.failure)
        self._origin = "from the start"
        self._damaged: dict[Path, str] = {}
        self._changed = self._resume(allow_changed)

    def fit(self, is_interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Train to the end of the schedule; the last step is evaluated and saved.

        Args:
            is_interrupted: asked after every step. If it holds on any rank, the step is saved and training ends.

        Returns:
            Whether the end was reached.

        Raises:
            RunError: too many steps were skipped, or too many checkpoints could not be written.
        """
        if self.step == self.recipe.num_steps:
            if self.mesh.is_main:
                print(
                    f"{self.output}: complete at step {self.step}; to train on, raise schedule.total_tokens and add "
                    "--allow-changed schedule.total_tokens"
                )
            return True
        with run_directory(self.output, self.mesh):
            return self._fit(is_interrupted)

    def _fit(self, is_interrupted: Callable[[], bool]) -> bool:
        log = self._open_log_together()
        warn = (lambda text: None) if log is None else lambda text: log.warn(f"step {self.step}: {text}")
        saves = Saves(self._saver, self.recipe.checkpoint.max_failed_saves, warn)
        try:
            while self.step < self.recipe.num_steps:
                record = self._train_one()
                if saves.failed:
                    record["failed_saves"] = saves.failed
                if log is not None:
                    log.step(record)
                interval = self.recipe.debug.check_ranks_interval
                if interval is not None and self.step % interval == 0:
                    check_agreement(self.model.parameters(), self.mesh)
                    if log is not None:
                        log.line(f"step {self.step}: ranks agree on every parameter")
                is_last = self.step == self.recipe.num_steps
                ends = self.mesh.any_rank(is_interrupted()) or is_last
                if ends or self._is_due(self.recipe.checkpoint.interval):
                    self.phases.enter(self.step, "checkpoint")
                    if log is not None:
                        log.flush()
                    (saves.save_now if ends else saves.save)(*self._what_to_save())
                if ends:
                    if log is not None:
                        log.summarize(self.phases.take(), step_directory(self.output, self.step))
                    self.phases.enter(self.step, "end")
                    break
        finally:
            self._saver.close()
            if log is not None:
                log.close()
        if log is not None:
            log.finish_trackers()
        return self.step == self.recipe.num_steps

    def evaluate(self) -> dict[str, float]:
        """Mean loss (nats per token) of each validation set, by its name. Every rank takes part."""
        count, size = self.recipe.logging.eval_sequences, self.recipe.data.micro_batch_size
        return {
            name: validation_loss(self.model, held_out.windows, count, size, self.mesh, self.data.eod_id)
            for name, held_out in self.data.validation.items()
        }

    def save(self) -> Path:
        """Save the checkpoint of the current step; every rank takes part.

        Under `checkpoint.asynchronous` it is complete when the next save starts.
        """
        return self._saver.save(*self._what_to_save())

    def _what_to_save(self) -> tuple[RunState, Optimizer, Router | None]:
        recipe = self.recipe
        state = RunState(
            step=self.step,
            tokens=self.step * recipe.tokens_per_step,
            samples=self.step * recipe.data.global_batch_size,
            seed=recipe.run.seed,
            data_fingerprint=self.data.batches.fingerprint,
            version=vha_paddle.__version__,
            skipped=self._skips.total,
            skipped_in_a_row=self._skips.in_a_row,
            losses=self._skips.losses,
        )
        balance = self.model.balance
        return state, self.optimizer, None if balance is None else balance.state()

    def _train_one(self) -> dict[str, Any]:
        """One optimizer step; returns its record for the log."""
        recipe = self.recipe
        start = time.perf_counter()

        def enter(phase: str) -> None:
            self.phases.enter(self.step + 1, phase)

        enter("data")
        tokens_BS, labels_BS = self._rows(self.step)
        tokens = (self.step + 1) * recipe.tokens_per_step
        rate = learning_rate(recipe.schedule, recipe.optim.lr, tokens)
        try:
            result = train_step(
                self.model,
                self.optimizer,
                tokens_BS,
                labels_BS,
                self.step * recipe.data.global_batch_size + self.mesh.own_rows(recipe.data.global_batch_size).start,
                recipe.data.micro_batch_size,
                rate,
                recipe.optim.max_grad_norm,
                self.mesh,
                enter,
                self.data.eod_id,
                fault_of=self._skips.fault,
            )
        except RunError as error:
            raise RunError(f"step {self.step + 1}: {error}") from None
        self.step += 1
        self._count_skipped(result.skipped, result.loss)
        seconds = time.perf_counter() - start
        record: dict[str, Any] = {
            "step": self.step,
            "tokens": tokens,
            "loss": result.loss,
            "lr": rate,
            "grad_norm": result.grad_norm,
            "grad_norms": result.norms.by_group,
            "tokens_per_second": recipe.tokens_per_step / seconds,
        }
        if result.moe is not None:
            record["moe"] = result.moe
        if result.skipped is not None:
            record |= {"skipped": result.skipped, "skipped_steps": self._skips.total}
        if self._is_due(recipe.logging.eval_interval):
            self.phases.enter(self.step, "evaluation")
            losses = self.evaluate()
            if losses:
                record["val_loss"] = math.fsum(losses.values()) / len(losses)
            if len(losses) > 1:
                record["val_losses"] = losses
        maps_interval = recipe.logging.maps_interval
        if maps_interval is not None and self._is_due(maps_interval):
            self.phases.enter(self.step, "maps")
            record["maps"] = measure_maps(self.model.parameters(), self.mesh)
        self.phases.enter(self.step, "log")
        record |= self._usage.record(with_memory=self._is_due(recipe.logging.interval))
        record["seconds"] = {phase: round(seconds, 6) for phase, seconds in self.phases.take().items()}
        return record

    def _is_due(self, interval: int | None) -> bool:
        """Whether what is done every so many steps, and after the last one, is done now."""
        return self.step == self.recipe.num_steps or (interval is not None and self.step % interval == 0)

    def _count_skipped(self, fault: str | None, loss: float) -> None:
        """Remember whether the step was applied.

        Raises:
            RunError: more steps were skipped than may be.
        """
        if fault is None:
            self._skips.applied(loss)
            return
        self._skips.skipped()
        if not self._skips.is_over_budget:
            return
        self._saver.close()
        good = self.mesh.objects(last_good_step(self.output))[0]
        raise RunError(
            f"step {self.step}: {fault}; steps skipped: {self._skips.total}, and failure.max_skipped_steps="
            f"{self.recipe.failure.max_skipped_steps}; "
            + (
                "nothing was saved yet"
                if good is None
                else f"last good checkpoint: {step_directory(self.output, good)}"
            )
            + "; look at the data of these steps, lower optim.lr, or raise failure.max_skipped_steps"
        )

    def _resume(self, allow_changed: Collection[str]) -> list[str]:
        """Continue from the newest checkpoint, if there is one, else from `run.start_from`; returns the keys that
        differ from the checkpoint's."""
        found = checkpoint_to_continue(self.recipe, self.data.batches.fingerprint, self.mesh, allow_changed)
        if found is None:
            start = start_from(self.recipe, self.model.named_tensors(), self.optimizer, self.mesh)
            if start is None:
                return []
            self._restore_routers(start, start.router_tensors())
            self._origin = f"from the weights of {start.path}"
            return [line for line in changed_keys(start.recipe, self.recipe) if line.startswith("model.")]
        checkpoint, self._damaged = found.checkpoint, found.damaged
        load_parameters(self.model.named_tensors(), checkpoint.model_tensors(), self.mesh)
        load_optimizer(self.optimizer, checkpoint, self.mesh)
        self._restore_routers(checkpoint)
        state = checkpoint.state
        self.step = state.step
        self._skips = Skips(self.recipe.failure, state.skipped, state.skipped_in_a_row, state.losses)
        self._origin = f"from step {self.step}"
        return changed_keys(checkpoint.recipe, self.recipe)

    def _restore_routers(self, checkpoint: Checkpoint, names: Container[str] | None = None) -> None:
        """Load and biases of a mixture of experts; of `names` alone, where given: biases may be new to a run."""
        balance = self.model.balance
        if balance is not None:
            wanted = {name: array for name, array in balance.state().items() if names is None or name in names}
            balance.restore(router_state(wanted, checkpoint))

    def _open_log_together(self) -> RunLog | None:
        """The log on the main rank; every rank fails if it cannot be opened."""
        with together(self.mesh):
            try:
                return self._open_log() if self.mesh.is_main else None
            except OSError as error:
                raise UserError(
                    f"run.output={self.output}: cannot be written ({error.strerror}); use another directory"
                ) from None

    def _open_log(self) -> RunLog:
        recipe = self.recipe
        aside = [f"{fault}: passed over, and kept as {set_aside(path).name}" for path, fault in self._damaged.items()]
        write_resolved_recipe(recipe, self.output)
        peaks = peaks_of(recipe, self.mesh.num_ranks)
        log = RunLog(recipe, self.output, self.step, peaks, self._unigram_entropies())
        log.line(self._opening_line())
        for line in self.data.passes(recipe.num_steps):
            log.line(line)
        if log.dropped:
            log.line(f"{METRICS_FILE}: dropped {log.dropped} records after step {self.step}, which are trained again")
        if log.missing:
            log.warn(f"{METRICS_FILE}: of the steps up to {self.step}, {log.missing} have no record")
        for text in aside:
            log.warn(text)
        if recipe.checkpoint.interval is None and recipe.num_steps > MOST_UNSAVED_STEPS:
            log.warn("checkpoint.interval is null: nothing is saved before the last step, and a failure costs all")
        if self._changed:
            log.line(f"changed since the checkpoint: {', '.join(self._changed)}")
        return log

    def _opening_line(self) -> str:
        recipe = self.recipe
        ranks = f"{self.mesh.num_ranks} rank" + "s" * (self.mesh.num_ranks > 1)
        return (
            f"{recipe.run.name}: {recipe.model.attention.kind}, {recipe.num_steps} steps of {recipe.tokens_per_step:,} "
            f"tokens on {ranks}, {self._origin}; output in {self.output}"
        )

    def _unigram_entropies(self) -> dict[str, float]:
        return {name: held_out.unigram_entropy for name, held_out in self.data.validation.items()}


def check_precision(recipe: Recipe) -> None:
    """Refuse a precision the device has no kernels for.

    Raises:
        UserError: bfloat16 on CPU, FP8 on a GPU that has none.
    """
    if recipe.precision.compute == "bfloat16" and paddle.device.get_device() == "cpu":
        raise UserError(
            "precision.compute=bfloat16: Paddle has no bfloat16 kernels on CPU; override with "
            "precision.compute=float32 or run on a GPU"
        )
    check_fp8(recipe.precision)
