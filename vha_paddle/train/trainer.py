"""A training run from a recipe: data, model, optimizer, the loop, evaluation, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import paddle

import vha_paddle
from vha_paddle.checkpoint.layout import Checkpoint, RunState
from vha_paddle.checkpoint.load import load_optimizer, load_parameters, router_state
from vha_paddle.checkpoint.save import CheckpointSaver
from vha_paddle.config import Recipe
from vha_paddle.counts import FlopRule, training_flops
from vha_paddle.data.indexed import IndexedTokens
from vha_paddle.data.loader import TokenBatches, ValidationWindows, unigram_entropy
from vha_paddle.data.tokenizer import Tokenizer
from vha_paddle.errors import RunError, UserError
from vha_paddle.evaluate import validation_loss
from vha_paddle.model.pipelined import build_model
from vha_paddle.parallel.agreement import check_agreement, together
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.precision.policy import check_fp8
from vha_paddle.train.maps import measure_maps
from vha_paddle.train.metrics import RunLog, measured_gemm_rate, write_resolved_recipe
from vha_paddle.train.optimizer import Optimizer
from vha_paddle.train.resume import changed_keys, checkpoint_to_continue
from vha_paddle.train.run_directory import run_directory
from vha_paddle.train.schedule import learning_rate
from vha_paddle.train.start import start_from
from vha_paddle.train.step import train_step


class RunData:
    """The run's tokens, opened and checked against the model before anything else starts."""

    def __init__(self, recipe: Recipe) -> None:
        """Open the datasets.

        Raises:
            UserError: a file is missing or damaged, or does not fit the tokenizer or the model.
        """
        if not Path(recipe.data.tokenizer).is_file():
            raise UserError(
                f"data.tokenizer={recipe.data.tokenizer}: no such file; make the data with tools/prepare_data.py "
                "(`make quickstart` does it for the quickstart) or correct its name"
            )
        tokenizer = Tokenizer.load(Path(recipe.data.tokenizer))
        vocab_size = recipe.model.vocab_size
        if tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"model.vocab_size={vocab_size}: must be at least the {tokenizer.vocab_size} tokens of "
                f"data.tokenizer={recipe.data.tokenizer}; raise it"
            )

        def opened(prefix: str) -> IndexedTokens:
            return IndexedTokens(Path(prefix), vocab_size=vocab_size, tokenizer_sha256=tokenizer.digest)

        train = opened(recipe.data.train)
        self.batches = TokenBatches(train, recipe.data.sequence_length, recipe.data.global_batch_size, recipe.run.seed)
        self.train_tokens = train.num_tokens
        self.validation: ValidationWindows | None = None
        self.unigram_entropy = math.nan
        if recipe.data.validation is not None:
            held_out = opened(recipe.data.validation)
            self.validation = ValidationWindows(held_out, recipe.data.sequence_length)
            self.unigram_entropy = unigram_entropy(held_out)


class Trainer:
    """Runs a recipe on this process's part of the mesh; every rank holds one."""

    def __init__(self, recipe: Recipe, data: RunData, mesh: Mesh) -> None:
        """Build the model and continue from the newest checkpoint where the recipe says so.

        Raises:
            UserError: the device lacks the recipe's precision, or an earlier run in `run.output` does not fit.
        """
        self.recipe, self.data, self.mesh = recipe, data, mesh
        self.output = Path(recipe.run.output)
        check_precision(recipe)
        self.model = build_model(recipe, mesh, recipe.precision.compute)
        self.optimizer = Optimizer(self.model.parameters(), recipe, mesh)
        self._saver = CheckpointSaver(self.output, recipe, Path(recipe.data.tokenizer), mesh)
        self.optimizer.before_update = self._saver.wait_for_copy
        self.step = 0
        self._origin = "from the start"
        self._changed = self._resume()

    def fit(self) -> None:
        """Train to the end of the schedule; the last step is evaluated and saved.

        Raises:
            RunError: loss or gradient is not finite, or a checkpoint could not be written.
        """
        if self.step == self.recipe.num_steps:
            if self.mesh.is_main:
                print(f"{self.output}: complete at step {self.step}; raise schedule.total_tokens to train on")
            return
        with run_directory(self.output, self.mesh):
            self._fit()

    def _fit(self) -> None:
        log = self._open_log_together()
        try:
            while self.step < self.recipe.num_steps:
                record = self._train_one()
                if log is not None:
                    log.step(record)
                interval = self.recipe.debug.check_ranks_interval
                if interval is not None and self.step % interval == 0:
                    check_agreement(self.model.parameters(), self.mesh)
                    if log is not None:
                        log.line(f"step {self.step}: ranks agree on every parameter")
                if self._is_due(self.recipe.checkpoint.interval):
                    self.save()
            self._saver.wait()
        finally:
            self._saver.close()
            if log is not None:
                log.close()

    def evaluate(self) -> float | None:
        """Mean validation loss (nats per token), or None without validation data. Every rank takes part."""
        windows = self.data.validation
        if windows is None:
            return None
        return validation_loss(
            self.model, windows, self.recipe.logging.eval_sequences, self.recipe.data.micro_batch_size, self.mesh
        )

    def save(self) -> Path:
        """Save the checkpoint of the current step; every rank takes part.

        Under `checkpoint.asynchronous` it is complete when the next save starts or `fit` returns.
        """
        recipe = self.recipe
        state = RunState(
            step=self.step,
            tokens=self.step * recipe.tokens_per_step,
            samples=self.step * recipe.data.global_batch_size,
            seed=recipe.run.seed,
            data_fingerprint=self.data.batches.fingerprint,
            version=vha_paddle.__version__,
        )
        balance = self.model.balance
        return self._saver.save(state, self.optimizer, None if balance is None else balance.state())

    def _train_one(self) -> dict[str, Any]:
        """One optimizer step; returns its record for the log."""
        recipe = self.recipe
        start = time.perf_counter()
        tokens_BS, labels_BS = self.data.batches.batch(self.step)
        tokens = (self.step + 1) * recipe.tokens_per_step
        rate = learning_rate(recipe.schedule, recipe.optim.lr, tokens)
        try:
            result = train_step(
                self.model,
                self.optimizer,
                tokens_BS,
                labels_BS,
                self.step * recipe.data.global_batch_size,
                recipe.data.micro_batch_size,
                rate,
                recipe.optim.max_grad_norm,
                self.mesh,
            )
        except RunError as error:
            raise RunError(f"step {self.step + 1}: {error}") from None
        self.step += 1
        record: dict[str, Any] = {
            "step": self.step,
            "tokens": tokens,
            "loss": result.loss,
            "lr": rate,
            "grad_norm": result.grad_norm,
            "tokens_per_second": recipe.tokens_per_step / (time.perf_counter() - start),
        }
        if result.moe is not None:
            record["moe"] = result.moe
        if self._is_due(recipe.logging.eval_interval):
            loss = self.evaluate()
            if loss is not None:
                record["val_loss"] = loss
        maps_interval = recipe.logging.maps_interval
        if maps_interval is not None and self._is_due(maps_interval):
            record["maps"] = measure_maps(self.model.parameters(), self.mesh)
        return record

    def _is_due(self, interval: int | None) -> bool:
        """Whether what is done every so many steps, and after the last one, is done now."""
        return self.step == self.recipe.num_steps or (interval is not None and self.step % interval == 0)

    def _resume(self) -> list[str]:
        """Continue from the newest checkpoint, if there is one, else from `run.start_from`; returns the keys that
        differ from the checkpoint's."""
        checkpoint = checkpoint_to_continue(self.recipe, self.data.batches.fingerprint, self.mesh)
        if checkpoint is None:
            start = start_from(self.recipe, self.model.named_tensors(), self.optimizer, self.mesh)
            if start is None:
                return []
            self._restore_routers(start, start.router_tensors())
            self._origin = f"from the weights of {start.path}"
            return [line for line in changed_keys(start.recipe, self.recipe) if line.startswith("model.")]
        load_parameters(self.model.named_tensors(), checkpoint.model_tensors(), self.mesh)
        load_optimizer(self.optimizer, checkpoint, self.mesh)
        self._restore_routers(checkpoint)
        self.step = checkpoint.state.step
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
        write_resolved_recipe(recipe, self.output)
        # causal: MFU counts only the scores that the mask keeps
        rule = FlopRule(sequence_length=recipe.data.sequence_length, causal=True)
        ceiling = measured_gemm_rate(recipe.precision.compute) * self.mesh.num_ranks
        peak = ceiling / training_flops(recipe.model, rule)
        log = RunLog(recipe, self.output, self.step, peak, self.data.unigram_entropy)
        log.line(self._opening_line())
        if self._changed:
            log.line(f"changed since the checkpoint: {', '.join(self._changed)}")
        return log

    def _opening_line(self) -> str:
        recipe = self.recipe
        epochs = recipe.num_steps * recipe.tokens_per_step / self.data.train_tokens
        ranks = f"{self.mesh.num_ranks} rank" + "s" * (self.mesh.num_ranks > 1)
        return (
            f"{recipe.run.name}: {recipe.model.attention.kind}, {recipe.num_steps} steps of {recipe.tokens_per_step:,} "
            f"tokens ({epochs:.2f} epochs) on {ranks}, {self._origin}; output in {self.output}"
        )


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
