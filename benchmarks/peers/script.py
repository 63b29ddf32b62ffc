"""A bare script up to its first step, as the peer of a start of recipes/cls.py. It imports nothing of this project.

    python benchmarks/peers/script.py TOKENS.arrow LABELS.npy VOCABULARY CLASSES LENGTH

It reads tokens from an Arrow file, as our recipe does from its second start on.
"""

import json
import os
import sys
import time

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification

BATCH = 32


def main() -> None:
    """Train one step, and print that it is done."""
    tokens, labels, vocabulary, classes, length = sys.argv[1:]
    rows, labels = Dataset.from_file(tokens), torch.from_numpy(np.load(labels))

    def collate(places: list[int]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(row_ids) for row_ids in rows[places]["input_ids"]]
        masks = [torch.ones(len(row_ids), dtype=torch.long) for row_ids in ids]
        padded = {"input_ids": pad_sequence(ids, True), "attention_mask": pad_sequence(masks, True)}
        return {**padded, "labels": labels[places]}

    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=int(vocabulary),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=int(length),
        num_labels=int(classes),
    )
    model = BertForSequenceClassification(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    order = torch.randperm(len(rows)).tolist()
    loader = torch.utils.data.DataLoader(order, batch_size=BATCH, collate_fn=collate)
    for batch in loader:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        break
    with open(os.environ["BENCH_GATE"] + "/reports", "w") as reports:
        print(json.dumps({"used": time.process_time(), "items": 1}), file=reports)
    time.sleep(600)


if __name__ == "__main__":
    main()
