"""Scores of texts: of tokens that a model predicts, and of texts that it writes, against true ones."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from app.data.rows import IGNORED
from app.errors import is_installed, not_installed
from app.training.scores.base import Metric


class TokenAccuracy(Metric):
    """The share of tokens that are predicted right; from logits [..., vocabulary] and tokens [...], -100 left out."""

    def __init__(self, likeliest: Callable[[Tensor], Tensor] = lambda predicted: predicted.argmax(-1)):
        """Prepare to count.

        Args:
            likeliest: finds the tokens with the largest logits.
        """
        super().__init__(2)
        self.likeliest = likeliest

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add a micro-batch."""
        there = target != IGNORED
        self.state += torch.stack([((self.likeliest(predicted) == target) & there).sum(), there.sum()])

    def scores(self) -> dict[str, float]:
        """Return accuracy."""
        right, tokens = self.total
        return {"accuracy": right / tokens}


def missing() -> str:
    """Say which scores there will not be, and how to have them; empty if sacrebleu is installed."""
    return "" if is_installed("sacrebleu") else f"no chrF and BLEU: {not_installed('sacrebleu')}"


def text_scores(written: Sequence[str], truth: Sequence[str], tokenize: str = "13a") -> dict[str, float]:
    """Score texts against one true text each, all of them together, by sacrebleu and rouge_score if installed.

    Args:
        tokenize: how BLEU cuts texts into words, by its name in sacrebleu.

    Returns:
        same, the share of texts that are exactly right, but for spaces around them; from 0 to 100: chrf (Popovic, 2015)
        and bleu (Papineni et al., 2002; Post, 2018) if sacrebleu is installed, and the means of the F1 of rouge1,
        rouge2 and rougeL (Lin, 2004) if rouge_score is.
    """
    same = (text.strip() == true.strip() for text, true in zip(written, truth, strict=True))
    score_by_name = {"same": sum(same) / len(truth)}
    if is_installed("sacrebleu"):
        import sacrebleu

        score_by_name["chrf"] = sacrebleu.corpus_chrf(list(written), [list(truth)]).score
        # Forced: without a word about texts whose words are cut already.
        score_by_name["bleu"] = sacrebleu.corpus_bleu(list(written), [list(truth)], tokenize=tokenize, force=True).score
    if is_installed("rouge_score"):
        from rouge_score.rouge_scorer import RougeScorer

        kinds = ["rouge1", "rouge2", "rougeL"]
        scorer = RougeScorer(kinds, use_stemmer=True)
        each = [scorer.score(true, text) for text, true in zip(written, truth, strict=True)]
        score_by_name |= {kind: 100 * sum(scores[kind].fmeasure for scores in each) / len(each) for kind in kinds}
    return score_by_name
