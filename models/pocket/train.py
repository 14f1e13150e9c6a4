"""Train the pocket model on the text of the running Python installation.

    python -P -m moe_runtime.models.pocket.train --output runs/moe --minutes 55
    python -P -m moe_runtime.models.pocket.train --output runs/dense --dense --steps 4000

The first command trains the Mixture-of-Experts model for a time, the second its dense baseline for
a number of steps (give it the steps that the first one reports). Both write their tokenizer,
checkpoints and a log to the output folder; started again with the same folder they go on from the
last checkpoint. `evaluate.py` measures the results and exports the model.
"""

import argparse
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.models.pocket.corpus import gather
from moe_runtime.models.pocket.data import BatchPlan, Streams, tokenize
from moe_runtime.models.pocket.model import (
    CONTEXT,
    NUM_EXPERTS,
    TOP_K,
    build_dense,
    build_moe,
)
from moe_runtime.models.pocket.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

# The balance loss is a mean over six layers, so this is 0.017 for each. A tenth of it leaves
# experts of the first layer, which sees bare token embeddings, almost unused.
BALANCE_LOSS_COEF = 0.1
Z_LOSS_COEF = 1e-3
CHECKPOINT_FILE = "checkpoint.pt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """When to stop: after a number of steps, or after a wall-clock time, whichever is first."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:
            raise ValueError("expected a number of steps or of minutes, got neither")

    def progress(self, *, step: int, elapsed_s: float) -> float:
        """Share of the budget that is spent, from 0 to 1."""
        by_steps = 0.0 if self.steps is None else step / self.steps
        by_time = 0.0 if self.seconds is None else elapsed_s / self.seconds
        return min(1.0, max(by_steps, by_time))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Optimiser settings. Rates follow a linear warm-up and a cosine to a twentieth."""

    peak_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup_steps: int = 150
    clip_norm: float = 1.0
    short_window: int = 256
    # The last part of the run sees whole contexts; before that, shorter windows are cheaper.
    long_window_after: float = 0.75
    checkpoint_every_s: float = 240.0
    log_every: int = 50

    def rate(self, *, step: int, progress: float) -> float:
        """Learning rate at a step, given how much of the budget is spent."""
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak_rate * cosine * min(1.0, (step + 1) / self.warmup_steps)

    def window(self, progress: float) -> int:
        """Tokens of context in the batches, given how much of the budget is spent."""
        return CONTEXT if progress >= self.long_window_after else self.short_window


def routing_losses(router_logits: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Load-balance and z loss, each the mean over the layers.

    The balance loss is Switch Transformer's (Fedus et al. 2021, eq. 4) for top-k, per layer: the
    one in `transformers` pools all layers first, under which an expert idle in one layer is
    excused by its namesake in another. 1.0 means perfectly even.

    Args:
        router_logits: one (T, E) tensor per layer.
    """
    balance: list[Tensor] = []
    z_losses: list[Tensor] = []
    for layer_logits in router_logits:
        logits = layer_logits.float().view(-1, NUM_EXPERTS)
        chosen = torch.topk(logits, TOP_K, dim=-1).indices
        counts = torch.bincount(chosen.reshape(-1), minlength=NUM_EXPERTS)
        shares = counts.float() / chosen.numel()
        balance.append(NUM_EXPERTS * (shares * logits.softmax(dim=-1).mean(dim=0)).sum())
        z_losses.append(logits.logsumexp(dim=-1).square().mean())
    return torch.stack(balance).mean(), torch.stack(z_losses).mean()


class Trainer:
    """A training run in a folder: steps, logging and checkpoints."""

    def __init__(
        self, model: "PreTrainedModel", *, folder: Path, recipe: Recipe, budget: Budget
    ) -> None:
        self.model = model
        self.folder = folder
        self.recipe = recipe
        self.budget = budget
        self.step = 0
        self.elapsed_s = 0.0
        self._is_moe = model.config.model_type == "qwen3_moe"
        self._optimizer = _make_optimizer(model, recipe)

    def resume(self) -> None:
        """Go on from the folder's checkpoint, if there is one."""
        path = self.folder / CHECKPOINT_FILE
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        _log.info("resumed at step %d after %.0f s", self.step, self.elapsed_s)

    def run(self, streams: Streams, plan: BatchPlan) -> None:
        """Train until the budget is spent, leaving a final checkpoint."""
        started = time.monotonic() - self.elapsed_s
        saved_at_s = self.elapsed_s
        self.model.train()
        while (progress := self.budget.progress(step=self.step, elapsed_s=self.elapsed_s)) < 1.0:
            batch = plan.draw(streams, step=self.step, window=self.recipe.window(progress))
            rate = self.recipe.rate(step=self.step, progress=progress)
            terms = self._take_step(torch.from_numpy(batch), rate)
            self.step += 1
            self.elapsed_s = time.monotonic() - started
            if self.step % self.recipe.log_every == 0:
                shown = " ".join(f"{name} {value:.4f}" for name, value in terms.items())
                speed = self.step * plan.tokens_per_step / self.elapsed_s
                _log.info("step %d %s rate %.2e %.0f tok/s", self.step, shown, rate, speed)
            if self.elapsed_s - saved_at_s >= self.recipe.checkpoint_every_s:
                self.save()
                saved_at_s = self.elapsed_s
        self.save()
        _log.info("done: %d steps, %d tokens", self.step, self.step * plan.tokens_per_step)

    def save(self) -> None:
        """Write the checkpoint beside the old one, then put it in its place."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
        }
        fresh = self.folder / (CHECKPOINT_FILE + ".new")
        torch.save(state, fresh)
        fresh.replace(self.folder / CHECKPOINT_FILE)

    def _take_step(self, batch: Tensor, rate: float) -> dict[str, float]:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        # Matrix products in bfloat16; weights, sums and the optimiser's state stay in float32.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = self._forward(batch[:, :-1])
            logits = self.model.lm_head(outputs.last_hidden_state)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].reshape(-1))
        terms = {"loss": loss}
        total = loss
        if self._is_moe:
            balance, z_loss = routing_losses(outputs.router_logits)
            total = loss + BALANCE_LOSS_COEF * balance + Z_LOSS_COEF * z_loss
            terms |= {"balance": balance, "z": z_loss}
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {name: float(value.detach()) for name, value in terms.items()}

    def _forward(self, inputs: Tensor) -> Any:
        options = {"output_router_logits": True} if self._is_moe else {}
        return self.model.model(inputs, use_cache=False, **options)


def _make_optimizer(model: "PreTrainedModel", recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices but not the gains of the norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), fused=True)


def prepare_tokenizer(folder: Path, documents: list[Any]) -> "PreTrainedTokenizerBase":
    """The folder's tokenizer; trained and saved there first if there is none."""
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").exists():
        train_tokenizer(documents, max_length=CONTEXT).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Command line of the training script."""
    parser = argparse.ArgumentParser(description="Train the pocket model.")
    parser.add_argument("--output", type=Path, required=True, help="folder of the run")
    parser.add_argument("--minutes", type=float, help="wall-clock budget")
    parser.add_argument("--steps", type=int, help="number of steps")
    parser.add_argument("--dense", action="store_true", help="train the dense baseline instead")
    parser.add_argument("--threads", type=int, default=1, help="threads for torch (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    options = parser.parse_args(arguments)
    if options.minutes is None and options.steps is None:
        parser.error("give --minutes, --steps or both")
    options.output.mkdir(parents=True, exist_ok=True)
    handlers = [logging.StreamHandler(), logging.FileHandler(options.output / "train.log")]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", handlers=handlers)

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    training = [document for document in gather() if not document.held_out]
    tokenizer: Any = prepare_tokenizer(options.output, training)
    streams = tokenize(training, tokenizer)
    _log.info("training tokens: %s", {kind: len(ids) for kind, ids in streams.items()})
    build = build_dense if options.dense else build_moe
    model = build(tokenizer.eos_token_id, tokenizer.pad_token_id)
    if not options.dense:
        # The grouped product is the fastest of the experts implementations on a CPU here.
        model.set_experts_implementation("grouped_mm")
    seconds = None if options.minutes is None else options.minutes * 60
    trainer = Trainer(
        model,
        folder=options.output,
        recipe=Recipe(),
        budget=Budget(steps=options.steps, seconds=seconds),
    )
    trainer.resume()
    trainer.run(streams, BatchPlan(seed=options.seed))


if __name__ == "__main__":
    main()
