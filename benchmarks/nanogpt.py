"""Compare recipes/lm.py with a plain training script on nanoGPT's CPU setting: same shape, optimizer, steps and text.

    python -m benchmarks.nanogpt score [--file text.txt]     # validation loss of both after all steps
    python -m benchmarks.nanogpt speed [--blocks 10]         # tokens per second of both, in turn

The setting is that of nanoGPT's README for a CPU (github.com/karpathy/nanoGPT): characters, 4 layers, 4 heads, 128
wide, blocks of 64, 12 a step, 2,000 steps, no dropout, no biases. The plain script is written here from that
description; it draws blocks at random places of the text, as nanoGPT does. Without --file the text is the first
megabyte of the ASCII sources of Python's library; its last tenth is for validation, and scored whole, in blocks.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from app import Run, parse
from app.data.corpus.blocks import token_loss
from recipes import lm

LAYERS, HEADS, WIDTH, BLOCK, BATCH, STEPS = 4, 4, 128, 64, 12, 2000
LR, MIN_LR, WARMUP, BETAS, DECAY, CLIP = 1e-3, 1e-4, 100, (0.9, 0.99), 0.1, 1.0
FLAGS = (
    "--data.packing concat --data.block 64 --scratch.tokenizer char --scratch.shape gpt2 --scratch.bias false "
    "--scratch.layers 4 --scratch.heads 4 --scratch.width 128 --run.global-batch 12 --run.micro-batch 12 "
    "--run.steps 2000 --optim.lr 1e-3 --optim.schedule cosine --optim.min-lr 0.1 --optim.warmup 100 "
    "--optim.betas 0.9 0.99 --optim.weight-decay 0.1 --optim.clip 1.0"
)


class Layer(nn.Module):
    """Attention and a feed-forward network, each after a norm and with a residual connection."""

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform [batch, length, width]."""
        parts = self.qkv(self.before_attention(x)).split(WIDTH, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Model(nn.Module):
    """GPT-2's shape without biases; embedding and head share one matrix."""

    def __init__(self, vocab: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if deep else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of tokens [batch, length]."""
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(step: int) -> float:
    """Return the learning rate: it rises for 100 steps, then follows a cosine to a tenth of the peak."""
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2


def plain_steps(train: Tensor, vocab: int, seed: int, fused: bool = False) -> Iterator[Model]:
    """Train the plain way; yield the model after every step. On a CPU nanoGPT's AdamW is not fused."""
    torch.manual_seed(seed)
    model, draws = Model(vocab), torch.Generator().manual_seed(seed)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=fused)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        places = torch.randint(len(train) - BLOCK, (BATCH,), generator=draws)
        loss = model(*(torch.stack([train[i + k : i + k + BLOCK] for i in places.tolist()]) for k in (0, 1)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield model


@torch.no_grad()
def plain_score(model: Model, text: Tensor) -> float:
    """Return the mean loss over all tokens of a text but the first, in consecutive blocks."""
    total = 0.0
    for low in range(0, len(text) - 1, BLOCK):
        high = min(low + BLOCK, len(text) - 1)
        total += model(text[None, low:high], text[None, low + 1 : high + 1]).item() * (high - low)
    return total / (len(text) - 1)


def our_config(folder: Path, seed: int, threads: int = 0) -> lm.Config:
    """Return the recipe's config from its flags."""
    files = ["--data.path", str(folder / "train.txt"), "--data.eval-path", str(folder / "val.txt")]
    others = ["--run.dir", str(folder / f"run-{seed}"), "--run.seed", str(seed), "--run.trackers"]
    rare = ["--run.save-every", "100000", "--run.eval-every", "100000", "--run.threads", str(threads)]
    return parse(lm.Config, [*FLAGS.split(), *files, *others, *rare])


def our_steps(config: lm.Config) -> Iterator[None]:
    """Train as recipes/lm.py does, pausing after every step."""
    from app.data.rows import stack

    with Run(config) as run:
        blocks, _, tokenizer, _ = lm.load_data(config)
        model, optimizer = run.prepare(lm.build_model(config, tokenizer), config.optim)
        for batch in run.batches(blocks, stack, weights=blocks.weights):
            for micro in batch.micros(model):
                run.backward(lm.loss_of(model, micro.inputs, token_loss), micro)
            run.step(optimizer)
            yield


def write_split(file: str, folder: Path) -> tuple[str, str]:
    """Write the first nine tenths of a text and the rest as two files; return both."""
    if file:
        text = Path(file).read_text(encoding="utf-8")
    else:
        from app.data.tables.builtin import BUILTINS

        text = "".join(t for t in BUILTINS["stdlib-files"]()["text"] if t.isascii())[:1_000_000]
    cut = int(len(text) * 0.9)
    parts = text[:cut], text[cut:]
    for name, part in zip(("train.txt", "val.txt"), parts, strict=True):
        (folder / name).write_text(part, encoding="utf-8")
    return parts


def main() -> None:
    """Print the validation losses, or the speeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("score", "speed"))
    parser.add_argument("--file", default="")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=0, help="of each; 0: as many as there are cores")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = write_split(options.file, folder)
        signs = sorted(set("".join(texts)))
        number = {sign: i for i, sign in enumerate(signs)}
        train, val = (torch.tensor([number[sign] for sign in text]) for text in texts)
        if options.what == "score":
            score(train, val, len(signs), options.seeds, folder)
        else:
            speed(train, len(signs), options, folder)


def score(train: Tensor, val: Tensor, vocab: int, seeds: int, folder: Path) -> None:
    """Train both to the end with each seed, and print their losses on the validation text."""
    for seed in range(seeds):
        *_, model = plain_steps(train, vocab, seed)
        plain = plain_score(model, val)
        ours = lm.main(our_config(folder, seed))["eval/loss"]
        print(f"seed {seed}: validation loss of the plain script {plain:.4f}, of recipes/lm.py {ours:.4f}", flush=True)


def speed(train: Tensor, vocab: int, options: argparse.Namespace, folder: Path) -> None:
    """Train all in alternating blocks of steps, and print the median speeds and the median ratios of a block.

    Ratios of processor time are printed too, because other work on the machine disturbs them less.
    """
    runs = {
        "plain script": plain_steps(train, vocab, 0),
        "plain script, fused": plain_steps(train, vocab, 0, fused=True),
        "recipes/lm.py": our_steps(our_config(folder, 0, options.threads)),
    }
    walls, cpus = {name: [] for name in runs}, {name: [] for name in runs}
    for block in range(options.blocks + 1):
        for name in list(runs) if block % 2 else reversed(runs):
            start, used = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                next(runs[name])
            if block:  # warm-up
                walls[name].append(time.perf_counter() - start)
                cpus[name].append(time.process_time() - used)
    tokens = options.steps * BATCH * BLOCK
    print(f"{torch.get_num_threads()} threads, {options.blocks} blocks of {options.steps} steps")
    for name in runs:
        ours = {"time": (walls[name], walls["recipes/lm.py"]), "processor time": (cpus[name], cpus["recipes/lm.py"])}
        ratios = {k: statistics.median(a / b for a, b in zip(*times, strict=True)) for k, times in ours.items()}
        told = ", ".join(f"{ratio:.3f} by {kind}" for kind, ratio in ratios.items())
        print(f"{name:<20} {tokens / statistics.median(walls[name]):,.0f} tokens/s; recipes/lm.py is {told} as fast")
    for run in runs.values():
        run.close()


if __name__ == "__main__":
    main()
