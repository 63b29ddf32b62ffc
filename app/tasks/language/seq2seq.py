"""Models that read a text and write another: new ones in the shape of T5 or BART, and pretrained ones."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import Tensor, nn

from app.config import setting
from app.config.needs import EVERYTHING, Needs
from app.data.config import PairData
from app.distributed import naming
from app.distributed.fsdp_calls import allow_views
from app.errors import UserError
from app.tasks.from_scratch import Scratch
from app.tasks.hollow import made_where_needed
from app.tasks.language import logits
from app.tasks.language.seq2seq_generation import Generate
from app.tasks.pretrained import load_model, load_tokenizer, loading, longest_input

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class PairScratch(Scratch):
    """The shape of a model that is trained from scratch."""

    shape: Literal["bart", "t5"] = "bart"
    """bart: learnt positions and LayerNorm, after layers. t5: relative positions and RMSNorm, before layers."""
    layers: int = setting(2, at_least=1)
    """Number of transformer layers of the encoder, and of the decoder."""
    width: int = setting(64, at_least=1)
    heads: int = setting(4, at_least=1)
    vocab: int = setting(1024, at_least=0)
    """Tokens in the vocabulary of the tokenizer, which is trained on both texts of the training pairs."""


@made_where_needed
def new_model(
    size: PairScratch, tokenizer: "PreTrainedTokenizerBase", data: PairData, generate: Generate
) -> "PreTrainedModel":
    """Build a model of this shape, with random weights."""
    from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    names: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": padding, "eos_token_id": end}
    if size.shape == "t5":
        return T5ForConditionalGeneration(
            T5Config(
                d_model=size.width,
                d_kv=size.width // size.heads,
                d_ff=4 * size.width,
                num_layers=size.layers,
                num_heads=size.heads,
                dropout_rate=size.dropout,
                **{**names, "decoder_start_token_id": padding},
            )
        )
    for part in ("encoder", "decoder"):
        names |= {
            f"{part}_layers": size.layers,
            f"{part}_attention_heads": size.heads,
            f"{part}_ffn_dim": 4 * size.width,
        }
    return BartForConditionalGeneration(
        BartConfig(
            d_model=size.width,
            max_position_embeddings=max(data.max_source, data.max_target, generate.max_new_tokens),
            dropout=size.dropout,
            bos_token_id=end,
            decoder_start_token_id=end,
            forced_eos_token_id=None,
            **names,
        )
    )


def load_pretrained(name: str, needs: Needs = EVERYTHING) -> "PreTrainedModel":
    """Load the model that --model names.

    Raises:
        UserError: it cannot be loaded, or does not write a text for a text.
    """
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    with loading(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if not getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"--model {name} has no encoder and decoder: give a model such as T5 or BART; recipes/lm.py trains those "
            "that go on with a text"
        )
    return load_model(AutoModelForSeq2SeqLM, name, once=True, needs=needs)


def load_pair_tokenizer(name: str, data: PairData) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of the model that --model names, for sources and targets of these lengths.

    Raises:
        UserError: it cannot be loaded, does not take texts of these lengths, or wants to know languages.
    """
    from transformers import AutoConfig

    tokenizer = load_tokenizer(name, data.max_source, "--data.max-source", unused=("mask_token",))
    if hasattr(tokenizer, "src_lang"):
        raise UserError(
            f"--model {name} writes in a language that is chosen by a token, which this recipe does not set: give a "
            "model of one pair of languages, such as one of Helsinki-NLP, or a T5 with --data.prefix"
        )
    with loading(name):
        longest = longest_input(AutoConfig.from_pretrained(name, trust_remote_code=False))
    if longest is not None and data.max_target > longest:
        raise UserError(
            f"--data.max-target {data.max_target} is more than the {longest} positions that --model {name} has: use a "
            "smaller one"
        )
    return tokenizer


def will_write(model: "PreTrainedModel", data: PairData, generate: Generate) -> "PreTrainedModel":
    """Have the saved model write texts as long as those that it is evaluated by: transformers stops after 20 tokens."""
    allow_views(r"\w*T5\w*")  # of positions, which the next layers only read
    settings = cast(Any, model.generation_config)
    settings.max_new_tokens, settings.max_length = generate.longest(data), None
    return model


def check_smoothing(smoothing: float) -> None:
    """Raise a UserError for a share that no label can give away."""
    if not smoothing < 1:
        raise UserError(f"--smoothing {smoothing}: must be from 0 to below 1, for example 0.1")


def predict(model: nn.Module, inputs: dict[str, Tensor], smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the logits of a micro-batch, [rows, length, vocabulary], and the tokens that are right, [rows, length].

    With --logits chunked, the logits are losses, [rows, length], with smoothed labels. The decoder sees the targets one
    place later, moved by the model's own function.
    """
    encoder_inputs = dict(inputs)
    targets = encoder_inputs.pop("labels")
    plain = cast(Any, naming.plain([model])[0])
    before = plain.prepare_decoder_input_ids_from_labels(labels=targets)
    with logits.told(model, targets, smoothing):
        return model(**encoder_inputs, decoder_input_ids=before, use_cache=False).logits, targets
