"""Tokenizers: trained on the training texts, made of bytes or characters, or pretrained and checked for the task."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from app.data.cache import cache_folder, made_once, using_cache
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase

# Part of the cache's key: raise it when training gives other tokenizers.
FORMAT = 1
SPECIALS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
# The tokens before a document and after it.
LM_SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>"]
# Those of texts to read and to write: T5's.
PAIR_SPECIALS = {"pad_token": "<pad>", "eos_token": "</s>"}
UNKNOWN = "<|unknown|>"
MASK = "<|mask|>"
# Words with the space before them, groups of up to three digits, and runs of punctuation. Underscores belong to words,
# so that identifiers of source code become few tokens. Further spaces, and line ends, say little and are dropped.
WORDS = r" ?[\p{L}\p{M}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}_]+"


# Words and signs one by one, without spaces: the same wherever a text is cut into tokens.
PIECES = r"[\p{L}\p{M}_]+|\p{N}{1,3}|[^\s\p{L}\p{M}\p{N}_]"


def trained_once(key: Sequence[object], train: "Callable[[], PreTrainedTokenizerBase]") -> "PreTrainedTokenizerBase":
    """Return the tokenizer that train() makes, or the one that another process or run made for the same key."""
    import tokenizers
    from transformers import AutoTokenizer

    folder = cache_folder() / f"tokenizer-{key_of(FORMAT, tokenizers.__version__, *key)}"
    with using_cache():
        made_once(folder, lambda draft: train().save_pretrained(draft))
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def tokenizer_of(
    kind: str, vocab: int, longest: int, key: Sequence[object], texts: Callable[[], Iterable[str]]
) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a language model from scratch.

    Args:
        kind: "byte", "char" (the texts' characters) or "bpe".
        vocab: tokens of bpe.
        longest: tokens of the longest text.
        key: what decides about the texts.
        texts: gives them.
    """
    if kind == "byte":
        return byte_tokenizer(longest)
    if kind == "char":
        return trained_once(("char", *key), lambda: character_tokenizer(texts(), longest))
    return trained_once(("lm", vocab, *key), lambda: train_lm_tokenizer(texts(), vocab, longest))


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int, pattern: str = WORDS
) -> "PreTrainedTokenizerBase":
    """Train a tokenizer for a BERT-style classifier: byte-level BPE, which keeps case and knows every character.

    The same texts in the same order give the same tokenizer. It marks single texts as `[CLS] text [SEP]` and pairs as
    `[CLS] first [SEP] second [SEP]` with token types 0 and 1. AutoTokenizer loads it once it is saved.

    Args:
        pattern: of what is a word.
    """
    from tokenizers import Regex, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [
        pre_tokenizers.Split(Regex(pattern), "removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer = _train_bpe(texts, vocab_size, list(SPECIALS.values()), pre_tokenizers.Sequence(words))
    marks = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **SPECIALS,
    )


def train_pair_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> "PreTrainedTokenizerBase":
    """Train a tokenizer for texts to read and to write: as a language model's, but each text ends with `</s>`.

    The same texts in the same order give the same tokenizer.
    """
    from tokenizers import pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer = _train_bpe(texts, vocab_size, list(PAIR_SPECIALS.values()), words)
    end = PAIR_SPECIALS["eos_token"]
    marks = [(end, tokenizer.token_to_id(end))]
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {end}", f"$A {end} $B {end}", marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **PAIR_SPECIALS,
    )


def train_lm_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> "PreTrainedTokenizerBase":
    """Train a tokenizer for a language model: byte-level BPE, with GPT-2's words, which can restore every text.

    The same texts in the same order give the same tokenizer.
    """
    from tokenizers import pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return _for_lm(_train_bpe(texts, vocab_size, LM_SPECIALS, words), max_length)


def byte_tokenizer(max_length: int) -> "PreTrainedTokenizerBase":
    """Make the tokenizer that needs no training: token i is byte i, for every i below 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = Tokenizer(models.BPE(vocab={sign: byte for byte, sign in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(LM_SPECIALS)
    return _for_lm(tokenizer, max_length)


def character_tokenizer(texts: Iterable[str], max_length: int) -> "PreTrainedTokenizerBase":
    """Make a tokenizer whose tokens are the characters of these texts, in order of their code points.

    Every other character becomes the token for unknown characters.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = set()
    for text in texts:
        characters |= set(text)
    vocabulary = {sign: i for i, sign in enumerate([*sorted(characters), UNKNOWN])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([UNKNOWN, *LM_SPECIALS])
    return _for_lm(tokenizer, max_length, unk_token=UNKNOWN)


def with_mask(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """Change the tokenizer of a language model for one that finds masked tokens, and return it.

    It gets a mask token, the last of the vocabulary. It puts the beginning-of-text token before a text, as training
    does, and pads on the right, because positions are learnt.
    """
    from tokenizers import processors

    tokenizer.add_special_tokens({"mask_token": MASK})
    begin = tokenizer.bos_token
    cast(Any, tokenizer).backend_tokenizer.post_processor = processors.TemplateProcessing(
        f"{begin} $A", f"{begin} $A {begin}:1 $B:1", [(begin, tokenizer.bos_token_id)]
    )
    tokenizer.padding_side = "right"
    return tokenizer


def _for_lm(tokenizer: "Tokenizer", max_length: int, **specials: str) -> "PreTrainedTokenizerBase":
    from transformers import PreTrainedTokenizerFast

    begin, end = LM_SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        bos_token=begin,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        **specials,
    )


def _train_bpe(texts: Iterable[str], vocab_size: int, specials: list[str], words: "PreTokenizer") -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < (smallest := len(alphabet) + len(specials)):
        raise UserError(
            f"--scratch.vocab {vocab_size} is too small: the vocabulary holds 256 bytes and {len(specials)} marks; "
            f"give {smallest} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=specials,
        # Sorted, because the order of a set of strings differs from process to process.
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def check_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", max_length: int, flag: str = "--data.max-length"
) -> "PreTrainedTokenizerBase":
    """Prepare a pretrained tokenizer to pad batches of texts of max_length tokens, or raise a UserError.

    If it has no padding token, as GPT-2's, it pads with its end-of-text token, which the attention mask hides. The
    model's config must then have the same `pad_token_id`.
    """
    name = tokenizer.name_or_path or type(tokenizer).__name__
    # transformers 5 makes one from a config alone; T5's then has one token more than its marks.
    if len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) < 2:
        raise UserError(
            f"--model {name} has no tokenizer, and so cannot read texts: put its files (tokenizer.json, or vocab.txt "
            "and the like) next to the weights, as tokenizer.save_pretrained(FOLDER) does"
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"--model {name}: its tokenizer has neither a padding nor an end-of-text token; add one to its "
                "tokenizer_config.json, or use another model"
            )
        tokenizer.pad_token = tokenizer.eos_token
    # A tokenizer without a limit has 1e30.
    if max_length > tokenizer.model_max_length:
        raise UserError(
            f"{flag} {max_length} is more than the {tokenizer.model_max_length} tokens that --model {name} "
            "takes: use a smaller one"
        )
    # Saved with the model, so that a pipeline cuts texts where training and evaluation did.
    tokenizer.model_max_length = max_length
    return tokenizer
