"""Texts that a model with encoder and decoder writes for texts."""

import itertools
from collections.abc import Iterator
from typing import Any


def texts(model: str, inputs: Iterator[dict[str, str]], data: dict[str, Any], batch: int) -> Iterator[dict[str, str]]:
    """Yield the text that a model writes for each text, by the settings of its generation_config.json.

    Args:
        data: the run's own flags of data; its prefix comes before each text.
        batch: texts in one call.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from app.tasks.pretrained import loading

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with loading(model, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    with loading(model, "weights"):
        network = AutoModelForSeq2SeqLM.from_pretrained(model, trust_remote_code=False).to(device).eval()
    while some := [f"{data.get('prefix', '')}{each['text']}" for each in itertools.islice(inputs, batch)]:
        read = tokenizer(some, padding=True, truncation=True, return_tensors="pt", return_token_type_ids=False)
        ids = network.generate(**read.to(device))
        yield from ({"prediction": text.strip()} for text in tokenizer.batch_decode(ids, skip_special_tokens=True))
