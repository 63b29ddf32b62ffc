"""Compare recipes/dpo.py with TRL's DPOTrainer: how often rewards are right on held-out pairs, and speed.

    python -m benchmarks.preferences [--seeds 0 1 2] [--only samestep trl] [--out FILE.json] [-- FLAGS of dpo.py]

All begin with the same small Llama, which recipes/lm.py has trained on the prompts and chosen answers; they train it on
the same pairs, with the same tokens, beta, batch, number of steps, learning rates and clipping, in fp32. `trl` computes
the reference once, as the recipe does; `trl-model` keeps a reference model, TRL's default. Dropout and recomputing are
off, and TRL's own order of samples is kept. One function scores all finished models, without the code of either.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.seeds import QUIET, Watch, compare, recipe_run, timed

START = "--data.prompt prompt --data.completion chosen --data.block 256 --run.epochs 3 --run.global-batch 16"
START += " --scratch.vocab 1000 --scratch.layers 2 --scratch.width 96"
FLAGS = "--run.steps 94 --run.global-batch 32 --run.micro-batch 8"
FLAGS += " --optim.lr 1e-3 --optim.min-lr 0 --loss.beta 0.1 --data.max-length 256"
KEPT = ("by_clock", "by_processor", "before")


def samestep(config, folder: str) -> dict[str, float]:
    """Train with the recipe."""
    from recipes import dpo

    pairs = held_out(config)
    scores = recipe_run(dpo, config, folder)
    return judged(config.model, f"{folder}/model", pairs) | {name: scores[name] for name in KEPT}


def trl(config, folder: str, cached: bool = True) -> dict[str, float]:
    """Train with TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from app.config import chosen
    from app.data.text.preferences import load_preferences

    pairs, watch = held_out(config), Watch()
    config, _ = chosen(config)
    run, optim = config.run, config.optim
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    # The recipe begins texts with this token; TRL leaves that to the tokenizer, and this one does not.
    rows = [{**row, "prompt": tokenizer.bos_token + row["prompt"]} for row in load_preferences(config.data).train]
    settings = DPOConfig(
        output_dir=folder, per_device_train_batch_size=run.micro_batch, max_steps=run.steps,
        gradient_accumulation_steps=run.global_batch // run.micro_batch, beta=config.loss.beta, max_length=None,
        precompute_ref_log_probs=cached, learning_rate=optim.lr, lr_scheduler_type=optim.schedule,
        warmup_steps=round(optim.warmup * run.steps), weight_decay=optim.weight_decay, max_grad_norm=optim.clip,
        adam_beta1=optim.betas[0], adam_beta2=optim.betas[1], optim="adamw_torch_fused", use_cpu=True, bf16=False,
        gradient_checkpointing=False, seed=run.seed, save_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False, logging_steps=run.log_every,
    )  # fmt: skip
    how = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32), args=settings,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[timed(watch)],
    )  # fmt: skip
    how.train()
    how.save_model(folder)
    return {**judged(config.model, folder, pairs), **watch.speeds(run.steps * run.global_batch)}


def trl_model(config, folder: str) -> dict[str, float]:
    """Train with TRL and a reference model, which each step runs."""
    return trl(config, folder, cached=False)


def held_out(config) -> list[dict[str, str]]:
    """Return the pairs that nobody trains on. The table is built here, so that nobody's time has it."""
    from app.data.text.preferences import load_preferences

    return list(load_preferences(config.data).evaluation)


def judged(start: str, folder: str, pairs: list[dict[str, str]]) -> dict[str, float]:
    """Return how often the chosen answer gained more than the rejected one over training, and is the likelier one."""
    import torch

    before, after = (torch.tensor([likelihoods(model, pairs) for model in (start, folder)]).double()).unbind()
    gained = after - before
    margin = gained[:, 0] - gained[:, 1]
    scores = {"reward_accuracy": (margin > 0).double().mean(), "margin": margin.mean()}
    scores["likelier"] = (after[:, 0] > after[:, 1]).double().mean()
    return {name: value.item() for name, value in scores.items()}


def likelihoods(folder: str, pairs: list[dict[str, str]]) -> list[list[float]]:
    """Return the log-probabilities of each pair's chosen and rejected answer in a model, [pairs, 2]."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def of(prompt: str, answer: str) -> float:
        words = tokenizer(tokenizer.bos_token + prompt, add_special_tokens=False)["input_ids"]
        answer_ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        logits = model(torch.tensor([words + answer_ids])).logits[0, len(words) - 1 : -1]
        return logits.double().log_softmax(-1)[range(len(answer_ids)), answer_ids].sum().item()

    return [[of(pair["prompt"], pair[kind]) for kind in ("chosen", "rejected")] for pair in pairs]


def written(folder: str) -> list[str]:
    """Write the pairs of builtin:slips; return the flags that name them.

    The line end between prompt and answer belongs to the answer here, so that TRL, which cuts both into tokens
    together, gets the same tokens as the recipe.
    """
    from app.data.config import PreferenceData
    from app.data.text.preferences import load_preferences

    tables = load_preferences(PreferenceData())
    flags = []
    for flag, table in (("path", tables.train), ("eval-path", tables.evaluation)):
        file = Path(folder, f"{flag}.jsonl")
        with file.open("w") as lines:
            for row in table:
                ends = {kind: f"\n{row[kind]}" for kind in ("chosen", "rejected")}
                lines.write(json.dumps({"prompt": row["prompt"].rstrip(), **ends}) + "\n")
        flags += [f"--data.{flag}", str(file)]
    return flags


def main() -> None:
    """Train the model to start with, once, unless flags name one; then alternate."""
    more = sys.argv[1:]
    if "--one" in more or "--model" in more or {"-h", "--help"} & {*more}:
        from recipes import dpo

        contestants = {"samestep": samestep, "trl": trl, "trl-model": trl_model}
        return compare("benchmarks.preferences", __doc__, dpo, contestants, FLAGS)
    with tempfile.TemporaryDirectory() as folder:
        flags, lm = written(folder), Path(__file__).parent.parent / "recipes/lm.py"
        words = [*START.split(), *flags, *QUIET.split(), "--run.dir", f"{folder}/start"]
        subprocess.run([sys.executable, lm, *words], check=True)
        sys.argv += [*([] if "--" in more else ["--"]), *flags, "--model", f"{folder}/start/model"]
        main()


if __name__ == "__main__":
    main()
