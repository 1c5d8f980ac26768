"""A training run from a recipe: data, model, optimizer, the loop, evaluation, checkpoints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import paddle

import vha_paddle
from vha_paddle.checkpoint.layout import (
    RECIPE_FILE,
    RunState,
    checkpoints_directory,
    list_steps,
    open_checkpoint,
    step_directory,
)
from vha_paddle.checkpoint.load import load_optimizer, load_parameters
from vha_paddle.checkpoint.save import remove_old_checkpoints, save_checkpoint
from vha_paddle.config import Recipe
from vha_paddle.counts import FlopRule, training_flops
from vha_paddle.data.indexed import IndexedTokens
from vha_paddle.data.loader import TokenBatches, ValidationWindows, unigram_entropy
from vha_paddle.data.tokenizer import Tokenizer
from vha_paddle.errors import RunError, UserError
from vha_paddle.evaluate import validation_loss
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.metrics import Console, MetricsLog, Wandb, measured_gemm_rate, write_resolved_recipe
from vha_paddle.train.optimizer import Optimizer
from vha_paddle.train.schedule import learning_rate
from vha_paddle.train.step import train_step


class RunData:
    """The run's tokens, opened and checked against the model before anything else starts."""

    def __init__(self, recipe: Recipe) -> None:
        """Open the datasets.

        Raises:
            UserError: a file is missing or damaged, or does not fit the tokenizer or the model.
        """
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
        self.model = build_decoder(recipe.model, mesh, recipe.run.seed, recipe.precision.compute)
        self.optimizer = Optimizer(self.model.parameters(), recipe, mesh)
        self.step = 0
        self._resume()

    def fit(self) -> None:
        """Train to the end of the schedule; the last step is evaluated and saved.

        Raises:
            RunError: loss or gradient is not finite, or a checkpoint could not be written.
        """
        recipe, mesh = self.recipe, self.mesh
        ceiling = measured_gemm_rate(recipe.precision.compute) * mesh.num_ranks
        # causal: MFU counts only the scores that the mask keeps
        rule = FlopRule(sequence_length=recipe.data.sequence_length, causal=True)
        flops_per_token = training_flops(recipe.model, rule)
        log = console = wandb = None
        if mesh.is_main:
            write_resolved_recipe(recipe, self.output)
            log, console = MetricsLog(self.output, self.step), Console(recipe, self.step)
            wandb = Wandb(recipe, self.output)
            console.line(self._opening_line())
        started, first_step = time.perf_counter(), self.step
        while self.step < recipe.num_steps:
            record = self._train_one()
            if mesh.is_main:
                assert log is not None and console is not None and wandb is not None
                log.write(record)
                wandb.log(record)
                console.advance()
                if self.step % recipe.logging.interval == 0 or self.step == recipe.num_steps:
                    mfu = record["tokens_per_second"] * flops_per_token / ceiling
                    per_step = (time.perf_counter() - started) / (self.step - first_step)
                    console.step_line(record, mfu, per_step * (recipe.num_steps - self.step))
                    if "val_loss" in record:
                        console.line(
                            f"validation loss {record['val_loss']:.4f} nats/token "
                            f"(unigram entropy {self.data.unigram_entropy:.4f})"
                        )
            self._save_when_due()
        if log is not None and console is not None and wandb is not None:
            log.close()
            console.close()
            wandb.close()

    def evaluate(self) -> float | None:
        """Mean validation loss (nats per token), or None without validation data. Every rank takes part."""
        windows = self.data.validation
        if windows is None:
            return None
        return validation_loss(
            self.model, windows, self.recipe.logging.eval_sequences, self.recipe.data.micro_batch_size
        )

    def save(self) -> Path:
        """Write the checkpoint of the current step; every rank takes part."""
        recipe = self.recipe
        state = RunState(
            step=self.step,
            tokens=self.step * recipe.tokens_per_step,
            samples=self.step * recipe.data.global_batch_size,
            seed=recipe.run.seed,
            data_fingerprint=self.data.batches.fingerprint,
            version=vha_paddle.__version__,
        )
        path = save_checkpoint(self.output, state, self.optimizer, recipe, Path(recipe.data.tokenizer), self.mesh)
        if self.mesh.is_main:
            remove_old_checkpoints(self.output, recipe.checkpoint.keep)
        return path

    def _train_one(self) -> dict[str, Any]:
        """One optimizer step; returns its record for the log."""
        recipe = self.recipe
        start = time.perf_counter()
        tokens_BS, labels_BS = self.data.batches.batch(self.step)
        tokens = (self.step + 1) * recipe.tokens_per_step
        rate = learning_rate(recipe.schedule, recipe.optim.lr, tokens)
        # random draws of a step depend on the seed and the step alone, so a resumed run repeats them
        paddle.seed((recipe.run.seed * 1_000_003 + self.step) % 2**31)
        try:
            result = train_step(
                self.model,
                self.optimizer,
                tokens_BS,
                labels_BS,
                recipe.data.micro_batch_size,
                rate,
                recipe.optim.max_grad_norm,
                self.mesh,
            )
        except RunError as error:
            raise RunError(f"step {self.step + 1}: {error}") from None
        self.step += 1
        record = {
            "step": self.step,
            "tokens": tokens,
            "loss": result.loss,
            "lr": rate,
            "grad_norm": result.grad_norm,
            "tokens_per_second": recipe.tokens_per_step / (time.perf_counter() - start),
        }
        interval = recipe.logging.eval_interval
        if self.step == recipe.num_steps or (interval is not None and self.step % interval == 0):
            loss = self.evaluate()
            if loss is not None:
                record["val_loss"] = loss
        return record

    def _save_when_due(self) -> None:
        interval = self.recipe.checkpoint.interval
        if self.step == self.recipe.num_steps or (interval is not None and self.step % interval == 0):
            self.save()

    def _resume(self) -> None:
        steps = list_steps(self.output)
        if not steps:
            return
        if self.recipe.checkpoint.resume == "never":
            raise UserError(
                f"checkpoint.resume=never: {checkpoints_directory(self.output)} already holds checkpoints; "
                "use auto to continue them or another run.output"
            )
        checkpoint = open_checkpoint(step_directory(self.output, steps[-1]))
        if checkpoint.recipe.model != self.recipe.model:
            raise UserError(
                f"{checkpoint.path / RECIPE_FILE}: the checkpoint was trained with another model section; "
                "use its recipe, or another run.output for a new run"
            )
        if checkpoint.state.data_fingerprint != self.data.batches.fingerprint:
            raise UserError(
                f"{checkpoint.path}: was trained on other data (files, data.sequence_length or run.seed differ); "
                "restore them, or use another run.output for a new run"
            )
        if checkpoint.state.samples != checkpoint.state.step * self.recipe.data.global_batch_size:
            raise UserError(
                f"data.global_batch_size={self.recipe.data.global_batch_size}: the checkpoint was trained with "
                f"{checkpoint.state.samples // checkpoint.state.step}; use that to continue it"
            )
        load_parameters(self.model.named_tensors(), checkpoint.model_tensors(), self.mesh)
        load_optimizer(self.optimizer, checkpoint, self.mesh)
        self.step = checkpoint.state.step

    def _opening_line(self) -> str:
        recipe = self.recipe
        epochs = recipe.num_steps * recipe.tokens_per_step / self.data.train_tokens
        where = f"from step {self.step}" if self.step else "from the start"
        return (
            f"{recipe.run.name}: {recipe.model.attention.kind}, {recipe.num_steps} steps of {recipe.tokens_per_step:,} "
            f"tokens ({epochs:.2f} epochs) on {self.mesh.num_ranks} ranks, {where}; output in {self.output}"
        )


def check_precision(recipe: Recipe) -> None:
    """Refuse a precision the device has no kernels for.

    Raises:
        UserError: bfloat16 on CPU.
    """
    if recipe.precision.compute == "bfloat16" and paddle.device.get_device() == "cpu":
        raise UserError(
            "precision.compute=bfloat16: Paddle has no bfloat16 kernels on CPU; override with "
            "precision.compute=float32 or run on a GPU"
        )
