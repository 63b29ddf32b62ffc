"""Texts that a model writes for texts in an evaluation, however it is wrapped, and how good they are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import Tensor, nn

from app.config import setting
from app.data.config import PairData
from app.distributed import collectives, naming
from app.distributed.fsdp_calls import is_sharded
from app.tasks.language.generate import quoted

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedTokenizerBase

    from app.data.text.pair_text import Evenly


@dataclass
class Generate:
    """Texts that each evaluation generates, and scores beside the targets."""

    rows: int = setting(256, at_least=0)
    """Evaluation rows that texts are generated for, evenly spread over all. 0: none."""
    beams: int = setting(1, at_least=1)
    """Beams of the search. 1: greedy, the likeliest token at each place."""
    max_new_tokens: int = setting(0, at_least=0)
    """Tokens of the longest text. 0: --data.max-target."""
    samples: int = setting(2, at_least=0)
    """Texts to print, next to their sources and targets."""
    tokenize: Literal["13a", "intl", "char", "zh", "none"] = "13a"
    """How BLEU cuts texts into words, by its name in sacrebleu: char or zh for Chinese, none for texts whose words are
    cut already."""

    def longest(self, data: PairData) -> int:
        """Return the tokens of the longest text."""
        return self.max_new_tokens or data.max_target


def written(
    run: Any,
    model: nn.Module,
    rows: "Evenly",
    collate: Callable[[list], dict[str, Tensor]],
    tokenizer: "PreTrainedTokenizerBase",
    longest: int,
    beams: int,
) -> list[str]:
    """Return the text that the model writes for each row, on every rank. A collective: every rank calls it.

    Rows are generated in the evaluation's micro-batches, which are the same on any layout.
    """
    plain = cast(Any, naming.plain([model])[0])
    sharded = is_sharded(plain)
    texts_here: dict[int, str] = {}
    for micro in run.evaluation(model, rows, collate, rows.lengths):
        if not micro.weight and not sharded:
            continue
        with _whole(plain, sharded):
            ids = plain.generate(
                input_ids=micro.inputs["input_ids"],
                attention_mask=micro.inputs["attention_mask"],
                max_new_tokens=longest,
                num_beams=beams,
                do_sample=False,
                # FSDP gathers layers from all ranks, so all must go on, also those whose texts have ended.
                synced_gpus=sharded,
            )
        if micro.weight:
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            texts_here |= dict(zip(micro.ids.tolist(), map(str.strip, texts), strict=True))
    text_by_row: dict[int, str] = {}
    for part in collectives.gather(texts_here):
        text_by_row |= part
    return [text_by_row[row] for row in range(len(rows))]


@contextmanager
def _whole(model: nn.Module, sharded: bool) -> Iterator[None]:
    """Gather the parameters outside of layers: `generate` calls the encoder by itself, which FSDP does not know of."""
    if sharded:
        cast("FSDPModule", model).unshard()
    try:
        yield
    finally:
        if sharded:
            cast("FSDPModule", model).reshard()


def beside(written: Sequence[str], texts: Sequence[dict[str, str]], samples: int) -> str:
    """Return some of the written texts, next to their sources and targets, to be printed."""
    lines = []
    for place in range(0, len(texts), -(-len(texts) // samples)) if samples else ():
        for title, text in {**texts[place], "written": written[place]}.items():
            lines += [f"  {title}:", quoted(text or " ")]
    return "\n".join(lines)
