"""Text from a model during its training, however it is wrapped."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from app.data.corpus.documents import start_of
from app.data.rows import IGNORED
from app.distributed import collectives, naming
from app.errors import printable
from app.sampling.seeding import seed_all
from app.tasks.language.attention import model_inputs
from app.tasks.pretrained import longest_input
from app.training.feeding.copying import map_tensors
from app.training.scores.collecting import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from app.data.corpus.masking import MaskedBlocks


def sample_text(model: nn.Module, tokenizer: "PreTrainedTokenizerBase", prompt: str, length: int, seed: int) -> str:
    """Have a model continue a prompt by at most `length` tokens; return both, to be printed.

    Tokens are drawn from the 50 likeliest, at temperature 0.8, with the seed. A collective: every rank calls it.
    """
    ids = [start_of(tokenizer), *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    plain = cast(Any, naming.plain([model])[0])
    # Models without a table of positions can write more than they were trained on; transformers would warn of it.
    longest = longest_input(plain.config) or getattr(plain.config, "max_position_embeddings", None)
    if longest is not None:
        ids = ids[-max(1, longest - length) :]
        length = min(length, longest - len(ids))
    inputs = torch.tensor([ids], device=next(plain.parameters()).device)
    seed_all(seed)
    with evaluating(model):
        written = plain.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=length,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            top_p=1.0,
            pad_token_id=tokenizer.pad_token_id,
            # FSDP gathers layers from all ranks, so all must go on, also those whose text has ended.
            synced_gpus=not collectives.alone(),
        )
    text = prompt + cast(str, tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True))
    return quoted(text)


def filled_in(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    rows: "MaskedBlocks",
    collate: Callable[[list], dict[str, Any]],
    length: int,
) -> str:
    """Have a model fill in what it has to find in the first `length` tokens of a row; return both texts, to be printed.

    A collective: every rank calls it.
    """
    device = next(model.parameters()).device
    length = min(length, rows.filled(0))
    batch = collate([{name: values[:length] for name, values in rows[0].items()}])
    inputs = model_inputs(map_tensors(lambda tensor: tensor.to(device), batch))
    targets, before = inputs.pop("targets")[0], inputs["input_ids"][0]
    with evaluating(model):
        likeliest = model(**inputs).logits[0].argmax(-1)
    # Also where it sees a random token or the right one.
    asked = torch.where(targets == IGNORED, before, tokenizer.mask_token_id)
    texts = {"masked": asked, "filled in": torch.where(targets == IGNORED, before, likeliest)}
    return "\n".join(f"  {title}:\n{quoted(cast(str, tokenizer.decode(ids)))}" for title, ids in texts.items())


def quoted(text: str) -> str:
    """Mark each line of a text that a model has written; a terminal acts on nothing in it."""
    return "\n".join("  | " + printable(line, also="\t") for line in text.splitlines())
