r"""Train a language model on preferences: pairs of answers of which one is better. From scratch, or a pretrained one.

    accelerate launch recipes/dpo.py
    accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/dpo.py --run.dir runs/ddp
    accelerate launch recipes/dpo.py --model Qwen/Qwen3-0.6B --lora.rank 8 \
        --data.path pairs.jsonl --data.max-length 1024
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app import EMAConfig, Needs, OptimConfig, Run, RunConfig, parse
from app.config import OnResume, setting
from app.data.config import PreferenceData
from app.tasks.activation_checkpointing import CHECKPOINTING_HELP, ActivationCheckpointing, checkpoint_activations
from app.tasks.from_scratch import LanguageScratch, check_direction, check_shape, decoder
from app.tasks.language import logits, use
from app.tasks.language.loading import load_language_model
from app.tasks.language.logits import Logits
from app.tasks.language.lora import Lora, add_adapters, check_lora, hold_base
from app.tasks.language.preference import Distill, PreferenceLossConfig, check_preferences, reference_of
from app.tasks.pretrained import load_tokenizer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from app.data.text.preference_table import PreferenceTable, TrainingPairs
    from app.tasks.language.preference import PreferenceLoss


@dataclass
class Config:
    """Train a language model on preferences."""

    model: str = ""
    """Pretrained model: a Hub id or a folder. Default: train from scratch, in the shape of --scratch."""
    scratch: LanguageScratch = field(default_factory=lambda: LanguageScratch(layers=2))
    lora: Lora = field(default_factory=Lora)
    data: PreferenceData = field(default_factory=PreferenceData)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    distill: Distill = field(default_factory=Distill)
    activation_checkpointing: ActivationCheckpointing = setting(
        "none", on_resume=OnResume.ACCEPT, help=CHECKPOINTING_HELP
    )
    logits: Logits = setting("auto", help=logits.HELP)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            lr=None, betas=(0.9, 0.95), weight_decay=0.1, schedule="cosine", warmup=0.1, min_lr=0.1
        )
    )
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(epochs=2, global_batch=32, micro_batch=8))

    def default_lr(self) -> tuple[float, str]:
        """Return the learning rate if --optim.lr is not given, and what it is for."""
        if self.lora.rank:
            return 2e-5, "LoRA adapters on preferences"
        return (1e-6, "preferences") if self.model else (2e-3, "training from scratch")


def load_data(
    config: Config, needs: Needs = Needs()
) -> "tuple[TrainingPairs, dict[str, PreferenceTable], PreTrainedTokenizerBase, str]":
    """Return training pairs and sets of evaluation pairs as token ids, the tokenizer, and a description."""
    from app.data.text import preferences

    tables = preferences.load_preferences(config.data, needs)
    if config.model:
        tokenizer = load_tokenizer(config.model, config.data.max_length)
    else:
        shape = config.scratch.tokenizer, config.scratch.vocab
        tokenizer = preferences.own_tokenizer(tables.train, config.data, *shape)
    train_pairs = preferences.training_pairs(tables, config.data, tokenizer)
    eval_sets = {name: preferences.tokenize(table, config.data, tokenizer) for name, table in tables.sets.items()}
    about = preferences.describe(tables, train_pairs, eval_sets, config.data)
    return train_pairs, eval_sets, tokenizer, about


def build_model(config: Config, tokenizer: "PreTrainedTokenizerBase", needs: Needs = Needs()) -> "PreTrainedModel":
    """Build a transformers model that predicts the next token, with adapters if --lora.rank asks."""
    if config.model:
        model = load_language_model(config.model, masked=False, needs=needs)
    else:
        model = decoder(config.scratch, tokenizer, config.data.max_length, needs=needs)
    model = add_adapters(model, config.lora)
    checkpoint_activations(model, config.activation_checkpointing)
    return model


def evaluate(run: Run, model: "nn.Module", pairs: "PreferenceTable", criterion: "PreferenceLoss") -> dict[str, float]:
    """Score the model on every evaluation pair, once each."""
    from app.training.scores.preference import PreferenceScores

    scores = run.scores_of(PreferenceScores())
    for micro in run.evaluation(model, pairs, pairs.collate, pairs.lengths):
        judged = criterion(model, micro.inputs)
        scores.update(micro.weight, judged.chosen, judged.rejected, loss=judged.loss)
    return scores.compute()


def main(config: Config) -> dict[str, float]:
    """Train the model and return its last scores."""
    from app.tasks.language.attention import Attention
    from app.tasks.language.preference import PreferenceLoss
    from app.tasks.language.reference import add_references, contents_of
    from app.tasks.language.teacher import load_copy, load_teacher

    with Run(config) as run:
        check_shape(config.scratch)
        check_direction(config.scratch, masked=False)
        check_lora(config.lora, config.model, run.accelerator, run.needs)
        check_preferences(config.loss, config.distill, config.lora, config.model)
        with run.main_process_first():
            train_pairs, eval_sets, tokenizer, about = load_data(config, run.needs)
        run.say(about)
        reference = reference_of(config.loss, config.model, config.lora, train_pairs.table is None, run.needs)
        plain = build_model(config, tokenizer, run.needs)
        Attention.of(plain, "auto", "concat", run)
        logits.choose(plain, config.logits, run, needed="--distill.teacher" if config.distill.teacher else "")
        hold_base(plain, config.lora, run.accelerator, run.needs)
        contents = contents_of(plain) if reference in ("cached", "copy") else ""
        run.keep_best("eval/accuracy")
        model, optimizer = run.prepare(plain, config.optim)
        if reference == "cached" and train_pairs.table is not None:
            add_references(run, model, contents, {"training": train_pairs.table, **eval_sets})
        copied = load_copy(config.model, contents, run, train_pairs) if reference == "copy" else None
        teacher = load_teacher(config.distill, tokenizer, run, train_pairs)
        criterion = PreferenceLoss(config.loss, reference, config.distill, teacher, copied)
        rows = train_pairs.rows
        for batch in run.batches(rows, train_pairs.collate, rows.lengths, weights=rows.weights):
            for micro in batch.micros(model):
                judged = criterion(model, micro.inputs)
                run.backward(judged.loss, micro)
                run.observe(judged.means, micro)
                run.observe_rows(lambda each=judged.each: each, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, eval_sets, criterion)
        return run.finish(model, tokenizer, use=use.command(masked=False, chats=train_pairs.chats))


if __name__ == "__main__":
    main(parse(Config))
