"""The loss of preferences: how much likelier than the rejected answer the chosen one is, next to a reference model."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.config.needs import EVERYTHING, Needs
from app.data.rows import IGNORED
from app.distributed import naming
from app.errors import UserError
from app.tasks.language.logits import told
from app.tasks.language.lora import Lora

PER_TOKEN = ("ipo", "simpo")
"""Kinds of losses that divide log-probabilities by the answer's number of tokens."""


@dataclass
class PreferenceLossConfig:
    """The loss of a pair of answers. Rewards are beta times the log-probability beyond that in the reference model."""

    kind: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    """sigmoid: DPO (Rafailov et al. 2023). hinge: SLiC (Zhao et al. 2023). ipo: the squared distance of the difference
    of rewards a token from its aim (Azar et al. 2023). simpo: sigmoid of rewards a token, without a margin (Meng et al.
    2024); beta is then 2 to 10."""
    beta: float = 0.1
    """How strongly the model is held to the reference: a larger one changes it less."""
    smoothing: float = 0.0
    """sigmoid and simpo: the probability that a preference is the wrong way round."""
    sft_weight: float | None = None
    """Weight of a second term, the mean negative log-likelihood of the chosen answer's tokens (RPO's alpha). Default: 1
    without a reference model, otherwise 0."""
    reference: Literal["auto", "cached", "adapters", "copy", "none"] = "auto"
    """The model that rewards are relative to. cached: this model before its training; what it says of all answers is
    computed once and kept on disk, so the data cannot be streamed. adapters: the model without its adapters, in each
    step; needs --lora.rank. copy: --model once more, whole on each device, in each step. none: none, as in CPO. auto:
    none from scratch; with --model cached, or of streamed data adapters if there are any, else copy."""


@dataclass
class Distill:
    """Follow a teacher too: the divergence of its next tokens from the model's, over the chosen answers."""

    teacher: str = ""
    """Model to follow, with the same tokenizer: a Hub id or a folder. Default: none."""
    weight: float = 1.0
    """Weight of this term in the loss."""
    temperature: float = 1.0
    """Both models' logits are divided by it, and the term is multiplied by its square (Hinton et al. 2015)."""


def check_preferences(loss: PreferenceLossConfig, distill: Distill, lora: Lora, model: str = "") -> None:
    """Raise a UserError for settings that are out of range or contradict each other, before data is read."""
    if not loss.beta > 0 or (loss.sft_weight or 0) < 0 or not 0 <= loss.smoothing < 0.5:
        raise UserError(
            f"--loss.beta {loss.beta}, --loss.sft-weight {loss.sft_weight}, --loss.smoothing {loss.smoothing}: beta "
            "must be above 0, the weight 0 or more, and smoothing at least 0 and below 0.5"
        )
    if loss.smoothing and loss.kind not in ("sigmoid", "simpo"):
        raise UserError(f"--loss.smoothing {loss.smoothing}: --loss.kind {loss.kind} has none; leave one of them out")
    if loss.reference == "adapters" and not lora.rank:
        raise UserError("--loss.reference adapters: the model has none; give --lora.rank 8, or --loss.reference cached")
    if loss.reference == "copy" and not model:
        raise UserError("--loss.reference copy: there is no --model to take a copy of; give --loss.reference none")
    if distill.weight < 0 or not distill.temperature > 0:
        raise UserError(
            f"--distill.weight {distill.weight}, --distill.temperature {distill.temperature}: the weight must be 0 or "
            "more, and the temperature above 0"
        )


def reference_of(
    loss: PreferenceLossConfig, model: str, lora: Lora, streamed: bool = False, needs: Needs = EVERYTHING
) -> str:
    """Return what --loss.reference stands for; a finished model that is evaluated as it is has none.

    Args:
        model: --model.
        streamed: whether the pairs to train on are read while training goes on.
        needs: of the run, `run.needs`.

    Raises:
        UserError: all pairs would have to be read before.
    """
    if needs.complete:
        return "none"
    in_steps = "adapters" if lora.rank else "copy" if model else "none"
    if loss.reference == "cached" and streamed:
        raise UserError(
            "--loss.reference cached: what the model says of all answers is computed before its training, and streamed "
            f"data are not read as a whole before: give --loss.reference {in_steps}"
        )
    if loss.reference != "auto":
        return loss.reference
    return "none" if not model else in_steps if streamed else "cached"


class Judged(NamedTuple):
    """What a model makes of the pairs of a micro-batch."""

    loss: Tensor
    """The mean over the pairs, a scalar."""
    each: Tensor
    """The loss of each pair, float64 [pairs]."""
    means: dict[str, Tensor]
    """Further means over the pairs, by name for the log."""
    chosen: Tensor
    """Rewards of the chosen answers, float64 [pairs]."""
    rejected: Tensor
    """Rewards of the rejected answers, float64 [pairs]."""


class PreferenceLoss:
    """The mean loss over the pairs of a micro-batch: each pair weighs the same, however long its answers are."""

    def __init__(
        self,
        config: PreferenceLossConfig,
        reference: str,
        distill: Distill,
        teacher: Callable[..., Any] | None = None,
        copied: Callable[..., Any] | None = None,
    ):
        """Choose the terms.

        Args:
            reference: what `reference_of` returned.
            teacher: the model of --distill.teacher.
            copied: the copy that is the reference.
        """
        self.config, self.reference, self.distill, self.teacher = config, reference, distill, teacher
        self.copied = copied
        default = 1.0 if reference == "none" else 0.0
        self.sft_weight = default if config.sft_weight is None else config.sft_weight

    def __call__(self, model: nn.Module, inputs: dict[str, Any]) -> Judged:
        """Run the model on a batch of PreferenceTable.collate."""
        logits = answer_logits(model, inputs)
        sums, tokens = log_probabilities(logits, inputs), inputs["tokens"]
        scores = sums - self._reference(model, inputs, sums)
        if self.config.kind in PER_TOKEN:
            scores = scores / tokens
        terms = {"preference": self.of_scores(*scores.chunk(2))}
        if self.sft_weight:
            terms["sft"] = -self.sft_weight * sums.chunk(2)[0] / tokens.chunk(2)[0]
        if self.teacher is not None:
            terms["distill"] = self.distill.weight * self._divergence(self.teacher, logits, inputs)
        each = cast(Tensor, sum(terms.values()))
        chosen, rejected = (self.config.beta * scores.detach()).chunk(2)
        means = {f"part/{name}": term.detach().mean() for name, term in terms.items() if len(terms) > 1}
        means |= {"reward/chosen": chosen.mean(), "reward/rejected": rejected.mean()}
        means |= {"reward/margin": (chosen - rejected).mean(), "reward/accuracy": (chosen > rejected).double().mean()}
        return Judged(each.mean().float(), each, means, chosen, rejected)

    def of_scores(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair from its answers' scores, [pairs]: log-probabilities beyond the reference's."""
        beta, smoothing = self.config.beta, self.config.smoothing
        if self.config.kind == "ipo":
            return (chosen - rejected - 1 / (2 * beta)).square()
        margin = beta * (chosen - rejected)
        if self.config.kind == "hinge":
            return functional.relu(1 - margin)
        right, wrong = functional.logsigmoid(margin), functional.logsigmoid(-margin)
        return -(1 - smoothing) * right - smoothing * wrong

    def _reference(self, model: nn.Module, inputs: dict[str, Any], sums: Tensor) -> Tensor:
        """Return the answers' log-probabilities in the reference model, float64 [2 x pairs]."""
        if self.reference == "cached":
            return inputs["reference"]
        if self.reference == "none":
            return torch.zeros_like(sums)
        if self.copied is not None:
            with torch.no_grad():
                return log_probabilities(answer_logits(self.copied, inputs), inputs)
        with torch.no_grad(), _without_adapters(model):
            return log_probabilities(answer_logits(model, inputs), inputs)

    def _divergence(self, teacher: Callable[..., Any], logits: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Return the teacher's divergence from the model, the mean over the tokens of each chosen answer, [pairs]."""
        count, pairs, heat = inputs["chosen_tokens"], len(inputs["tokens"]) // 2, self.distill.temperature
        chosen_inputs = {**inputs, "input_ids": inputs["input_ids"][:pairs], "places": inputs["places"][:count]}
        with torch.no_grad():
            taught = answer_logits(teacher, chosen_inputs)
        both = min(taught.shape[1], logits.shape[1])  # some models have rows behind those of their tokens
        taught = (taught[:, :both].float() / heat).log_softmax(-1)
        learnt = (logits[:count, :both].float() / heat).log_softmax(-1)
        each = functional.kl_div(learnt, taught, reduction="none", log_target=True).sum(-1) * heat**2
        return _by_answer(each, chosen_inputs) / inputs["tokens"][:pairs]


def answer_logits(model: Callable[..., Any], inputs: dict[str, Any]) -> Tensor:
    """Return the logits that predict answers, [tokens of answers, vocabulary]; or the tokens' losses, [tokens].

    There is no padding mask: what fills up a row comes after it, where no token looks.
    """
    ids, keep, places = inputs["input_ids"], inputs["logits_to_keep"], inputs["places"]
    targets = torch.full_like(ids[:, :1], IGNORED).repeat(1, keep)
    targets = targets.flatten().scatter(0, places, inputs["targets"]).view_as(targets)
    with told(model, targets):
        logits = model(input_ids=ids, logits_to_keep=keep, use_cache=False).logits
    return logits[:, -keep:].flatten(0, 1).index_select(0, places)


def log_probabilities(logits: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Return the log-probability of each answer, float64 [2 x pairs]: the sum over its tokens.

    Of losses of tokens, it is the negative sum. logsumexp keeps one number a token for the backward pass, where
    log_softmax would keep another copy of all logits.
    """
    if logits.ndim == 1:
        return _by_answer(-logits, inputs)
    right = logits.gather(1, inputs["targets"][:, None])[:, 0].float()
    return _by_answer(right - logits.float().logsumexp(1), inputs)


def _by_answer(values: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Sum over the tokens of each answer, in float64; the order of the terms is fixed, on GPUs too."""
    rows, keep = len(inputs["input_ids"]), inputs["logits_to_keep"]
    padded = torch.zeros(rows * keep, dtype=torch.float64, device=values.device)
    return padded.scatter(0, inputs["places"], values.double()).view(rows, keep).sum(1)


def _without_adapters(model: nn.Module) -> AbstractContextManager[Any]:
    """Switch the adapters of peft off for a block."""
    return cast("AbstractContextManager[Any]", cast(Any, naming.plain([model])[0]).disable_adapter())
