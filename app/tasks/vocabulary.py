"""Whether a pretrained model has an embedding for every token that its tokenizer, or its own config, can give."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# What tokenizers call the tokens of pictures and sounds, which a model of texts alone need not embed.
NOT_OF_TEXTS = ("image_token", "boi_token", "eoi_token", "audio_token", "boa_token", "eoa_token", "video_token")
# Ids in a config that are embedded: padding by every model, the others by those with encoder and decoder.
PADDING, BEFORE_TARGETS = ("pad_token_id",), ("pad_token_id", "decoder_start_token_id", "forced_bos_token_id")


def check_vocabulary(
    name: str,
    config: "PreTrainedConfig",
    tokenizer: "PreTrainedTokenizerBase",
    unused: Sequence[str] = (),
    pair: bool = False,
) -> None:
    """Compare the tokens of a tokenizer with the rows of a model's embedding.

    Args:
        name: the model, as --model names it.
        unused: the names of special tokens that nobody gives to this model, such as `mask_token`. Public models lack
            embeddings of such tokens.
        pair: whether texts come in pairs, whose second one may be marked by a type.

    Raises:
        UserError: a token, or the type of a text, has no row.
    """
    rows = rows_of(config)
    if rows is None:
        return
    number_by_token = tokenizer.get_vocab()
    for each in (*NOT_OF_TEXTS, *unused):
        token = getattr(tokenizer, each, None)
        if isinstance(token, str):
            number_by_token.pop(token, None)
    token, largest = max(number_by_token.items(), key=lambda item: item[1])
    if largest >= rows:
        raise UserError(
            f"--model {name}: its tokenizer has tokens up to {largest} ({token!r}), and the model embeds {rows} (0 to "
            f"{rows - 1}): give it the tokenizer that it was trained with, or new rows with "
            f"model.resize_token_embeddings({largest + 1}), and save both"
        )
    if pair and "token_type_ids" in tokenizer.model_input_names:
        types = max(tokenizer("a", "a", return_token_type_ids=True)["token_type_ids"])
        if types >= (there := getattr(config, "type_vocab_size", None) or types + 1):
            raise UserError(
                f"--model {name}: its tokenizer marks the second text of a pair by type {types}, and the model has "
                f"{there} types (type_vocab_size): give it the tokenizer that it was trained with"
            )


def check_ids(name: str, config: "PreTrainedConfig", said: Any, file: str = "config.json") -> None:
    """Refuse ids that a model embeds, and for which it has no row.

    Args:
        said: what has them as attributes.
        file: where they are from.

    Raises:
        UserError: it names the first such id.
    """
    rows = rows_of(config)
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    for field in BEFORE_TARGETS if encoder_decoder else PADDING:
        token = getattr(said, field, None)
        if rows is not None and isinstance(token, int) and not -rows <= token < rows:
            raise UserError(
                f"--model {name}: the {field} of its {file} is {token}, and the model embeds {rows} tokens (0 to "
                f"{rows - 1}): write that of its tokenizer there"
            )


def check_sizes(name: str, model: "PreTrainedModel", mismatched: Sequence[tuple], may_differ: bool) -> None:
    """Refuse weights of other sizes than the model's, in whose place there would be new ones.

    Args:
        mismatched: the names of such weights, with the sizes that they have and that the model has.
        may_differ: whether layers may have other sizes, as for other classes; embeddings never may.

    Raises:
        UserError: it names the first such weight.
    """
    names = _embeddings(model) if mismatched else set()
    for key, *sizes in mismatched:
        if key in names or not may_differ:
            there, asked = (" x ".join(map(str, size)) for size in sizes)
            raise UserError(
                f"--model {name}: its weights {key} are {there}, and its config.json asks for {asked}: correct "
                "config.json, or copy it and the weights from one place"
            )


def _embeddings(model: "PreTrainedModel") -> set[str]:
    """Return the names of the weights that embed a model's inputs."""
    try:
        embedded = model.get_input_embeddings()
    except NotImplementedError:  # a model of images may not say it
        return set()
    embedding_ids = {id(value) for value in embedded.parameters()} if embedded is not None else set()
    return {key for key, value in model.named_parameters(remove_duplicate=False) if id(value) in embedding_ids}


def rows_of(config: "PreTrainedConfig") -> int | None:
    """Return for how many tokens a model has embeddings; None if it has none, or its config does not say it."""
    parts = (config.get_text_config(), getattr(config, "encoder", None), getattr(config, "decoder", None))
    sizes = [getattr(part, field, None) for part in parts for field in ("vocab_size", "decoder_vocab_size")]
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=None)
