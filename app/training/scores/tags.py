"""Scores of tags: of entities, which are spans of tokens, and of tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.data.rows import IGNORED
from app.training.scores.base import TRY, Metric
from app.training.scores.classification import Classification, of_counts

PREFIXES = "OBIES"
"""Of tags such as B-name: outside, begin, inside, end, single. O has no name."""


class EntityScores(Metric):
    """Precision, recall and F1 of entities, and accuracy of tokens; from logits and tags, -100 where there is none.

    An entity counts if its type and both of its ends are right. What is an entity where tags do not fit each other
    (I-name after O) is decided as conlleval and seqeval do.
    """

    def __init__(self, names: Sequence[str]):
        """Prepare to count.

        Args:
            names: of the tags, in the order of the model's outputs, such as O, B-name, I-name.
        """
        self.types = sorted({name[2:] for name in names if name[0] != PREFIXES[0]})
        # Right entities, found, there; right tokens, all tokens; then the first three for each type.
        super().__init__(5 + 3 * len(self.types))
        self._prefixes = np.array([PREFIXES.index(name[0]) for name in names])
        self._kinds = np.array([-1 if name[0] == PREFIXES[0] else self.types.index(name[2:]) for name in names])

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add a micro-batch: [rows, length, tags] and [rows, length]."""
        has_tag = target != IGNORED
        rows = has_tag.nonzero()[:, 0].cpu().numpy()
        chosen, right = predicted.argmax(-1)[has_tag].cpu().numpy(), target[has_tag].cpu().numpy()
        predicted_entities, there = (self._entities(tags, rows) for tags in (chosen, right))
        counts = [
            len(there & predicted_entities),
            len(predicted_entities),
            len(there),
            int((chosen == right).sum()),
            len(right),
        ]
        by_type = [self._by_type(entities) for entities in (there & predicted_entities, predicted_entities, there)]
        whole = np.concatenate([counts, *by_type])
        self.state += torch.tensor(whole, dtype=torch.float64, device=self.state.device)

    def _by_type(self, entities: set[tuple[int, int, int]]) -> np.ndarray:
        """Count entities of each type."""
        return np.bincount([kind for _, _, kind in entities], minlength=len(self.types))

    def _entities(self, tags: np.ndarray, rows: np.ndarray) -> set[tuple[int, int, int]]:
        """Return entities as (first place, last place, type) in tags [tokens] of sentences [tokens] one after another.

        The rules of conlleval (Tjong Kim Sang and Buchholz, 2000), with E and S as in seqeval.
        """
        outside, begin, inside, end = range(4)
        # An O after each sentence, so that no entity goes on in the next one.
        gaps = np.flatnonzero(np.diff(rows, append=-1)) + 1
        places = np.insert(np.arange(len(tags)), gaps, -1)
        prefix = np.insert(self._prefixes[tags], gaps, outside)
        kind = np.insert(self._kinds[tags], gaps, -1)  # -1: none
        before, kind_before = np.roll(prefix, 1), np.roll(kind, 1)  # the last one is an O
        goes_on = np.isin(before, (begin, inside)) & np.isin(prefix, (inside, end)) & (kind == kind_before)
        starts = np.flatnonzero((prefix != outside) & ~goes_on)
        ends = np.flatnonzero((before != outside) & ~goes_on) - 1
        return set(zip(places[starts].tolist(), places[ends].tolist(), kind[starts].tolist(), strict=True))

    def scores(self) -> dict[str, float]:
        """Return precision, recall and f1 of entities, 0 where there is none, and accuracy of tokens."""
        hit, predicted_count, there, right, tokens = self.total[:5]
        shares = {"precision": (hit, predicted_count), "recall": (hit, there), "f1": (2 * hit, predicted_count + there)}
        return {
            **{name: part / whole if whole else 0.0 for name, (part, whole) in shares.items()},
            "accuracy": right / tokens,
        }

    def fault(self) -> str:
        """Say that no entity is found, where there are some."""
        _, predicted_count, there, *_ = self.total
        return f"no entity is found, and there are {int(there):,}: {TRY}" if there and not predicted_count else ""

    def report(self) -> dict[str, Any]:
        """Return `entities`: precision, recall, f1 and support by type, and their means, as seqeval's report."""
        counts = np.array(self.total[5:]).reshape(3, -1).T
        each = {
            name or "_": of_counts(hit, predicted_count, there, "support")
            for name, (hit, predicted_count, there) in zip(self.types, counts.tolist(), strict=True)
        }
        hit, predicted_count, there = self.total[:3]
        whole = {"micro avg": of_counts(hit, predicted_count, there, "support")}
        scores = [[row[key] or 0.0 for key in ("precision", "recall", "f1")] for row in each.values()]
        supports = np.array([row["support"] for row in each.values()], float)
        for name, shares in (("macro avg", np.ones(len(each))), ("weighted avg", supports)):
            if shares.sum():
                means = (np.array(scores) * shares[:, None]).sum(0) / shares.sum()
                whole[name] = {
                    **dict(zip(("precision", "recall", "f1"), means.tolist(), strict=True)),
                    "support": int(there),
                }
        return {"entities": {**each, **whole}}


class TokenScores(Classification):
    """Accuracy of tokens, and F1 as the mean over tags that occur; from logits and tags, -100 where there is none."""

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add a micro-batch: [rows, length, tags] and [rows, length]."""
        has_tag = target != IGNORED
        super().update(predicted[has_tag], target[has_tag])

    def in_depth(self) -> list[Metric]:
        """Return no calibration: it would count the tokens that have no tag."""
        return []
