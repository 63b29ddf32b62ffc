"""Texts that models write: for texts, and as the continuation of prompts and conversations."""

import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

    from app.data.corpus.chat_template import ChatTemplate


def texts(model: str, inputs: Iterator[dict[str, str]], data: dict[str, Any], batch: int) -> Iterator[dict[str, str]]:
    """Yield the text that a model writes for each text, by the settings of its generation_config.json.

    Args:
        data: the run's own flags of data; its prefix comes before each text.
        batch: texts in one call.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from app.tasks.pretrained import loading
    from app.tasks.vocabulary import check_vocabulary

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with loading(model, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    with loading(model, "weights"):
        network = AutoModelForSeq2SeqLM.from_pretrained(model, trust_remote_code=False).to(device).eval()
    check_vocabulary(model, network.config, tokenizer, unused=("mask_token",))
    while some := [f"{data.get('prefix', '')}{each['text']}" for each in itertools.islice(inputs, batch)]:
        read = tokenizer(some, padding=True, truncation=True, return_tensors="pt", return_token_type_ids=False)
        ids = network.generate(**read.to(device))
        yield from ({"prediction": text.strip()} for text in tokenizer.batch_decode(ids, skip_special_tokens=True))


def continued(
    model: str, rows: "Dataset", column: str, data: dict[str, Any], batch: int, longest: int
) -> Iterator[dict[str, str]]:
    """Yield what a language model writes after each prompt, by the settings of its generation_config.json.

    Args:
        column: of prompts, texts or conversations: lists of messages, which its chat template writes out.
        data: the run's flags of data, of which `date` is what its template writes for today's.
        batch: prompts in one call.
        longest: the most tokens to write for one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from app.data.config import check_date
    from app.data.corpus.chat_template import ChatTemplate
    from app.tasks.pretrained import load_model, loading
    from app.tasks.vocabulary import check_vocabulary

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with loading(model, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    network: Any = load_model(AutoModelForCausalLM, model).eval()
    network.to(device)
    check_vocabulary(model, network.config, tokenizer)
    date = str(data.get("date") or "")
    check_date(date)
    template = ChatTemplate(tokenizer, date)
    for start in range(0, len(rows), batch):
        ids = [_prompt(template, rows, column, row) for row in range(start, min(start + batch, len(rows)))]
        read = tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(device)
        sequences = network.generate(**read, max_new_tokens=longest, pad_token_id=tokenizer.pad_token_id)
        new = sequences[:, read["input_ids"].shape[1] :]
        yield from ({"prediction": text} for text in tokenizer.batch_decode(new, skip_special_tokens=True))


def _prompt(template: "ChatTemplate", rows: "Dataset", column: str, row: int) -> list[int]:
    """Return a prompt as tokens, as training began its documents and read its messages."""
    from app.data.corpus.documents import start_of
    from app.data.corpus.messages import messages_of
    from app.data.tables.columns import row_name

    value, where, flag = rows[row][column], functools.partial(row_name, rows, row), f"--text {column}"
    if isinstance(value, str):
        return [start_of(template.tokenizer), *template.tokenizer(value, add_special_tokens=False)["input_ids"]]
    if not isinstance(value, list | dict) or not value:
        raise UserError(f"{flag}: {where()} has no prompt: give a text or a list of messages")
    if not template.source:
        raise UserError(f"{flag} holds conversations, and the model's tokenizer has no chat template")
    messages = messages_of(value, where, flag, template.source)
    written = template.write(messages, where, flag, add_generation_prompt=True)
    # The template has written the special tokens.
    return template.tokenizer(written, add_special_tokens=False)["input_ids"]
