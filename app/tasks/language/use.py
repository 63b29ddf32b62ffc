"""Commands that use a finished language model."""

_NEXT = (
    "python -c 'from transformers import pipeline; "
    """print(pipeline("text-generation", "{model}")("some text", max_new_tokens=60))'"""
)
_MASKED = (
    "python -c 'from transformers import pipeline; "
    """fill = pipeline("fill-mask", "{model}"); print(fill("some " + fill.tokenizer.mask_token + " text"))'"""
)
# transformers 5 has no pipeline for models with encoder and decoder.
WRITES = (
    "python -c 'from transformers import AutoModelForSeq2SeqLM, AutoTokenizer; "
    """t, m = (kind.from_pretrained("{model}") for kind in (AutoTokenizer, AutoModelForSeq2SeqLM)); """
    """print(t.decode(m.generate(**t("some text", return_tensors="pt"))[0], skip_special_tokens=True))'"""
)


def command(masked: bool, chats: bool) -> str:
    """Return the command for a kind of model, with {model} where its folder belongs.

    Args:
        masked: whether it finds masked tokens.
        chats: whether it was trained on conversations.
    """
    if masked:
        return _MASKED
    return _NEXT.replace('"some text"', '[dict(role="user", content="some text")]') if chats else _NEXT
