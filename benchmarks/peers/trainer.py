"""Hugging Face's Trainer with its fused optimizer and its own loop; a callback takes turns with the others."""

import tempfile

from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.gate import Gate
from benchmarks.jobs import Job


class _Turns(TrainerCallback):
    def __init__(self, gate: Gate, items: float):
        self.gate, self.items = gate, items

    def on_step_end(self, *_, **__):
        self.gate(self.items)


def train(job: Job, gate: Gate, own_order: bool = False, compiled: bool = False) -> None:
    """Train in one process.

    Args:
        own_order: whether Trainer shuffles the rows itself; if not, they come in our order.
    """
    trainer = _trainer(job, gate, own_order, compiled)
    gate.begin()
    trainer.train()


def evaluate(job: Job, gate: Gate) -> None:
    """Evaluate accuracy repeatedly."""

    def accuracy(predicted):
        return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

    trainer = _trainer(job, gate, False, False, compute_metrics=accuracy, eval_dataset=job.eval_rows)
    gate.begin()
    while gate.left >= 0:
        trainer.evaluate()
        gate(len(job.eval_rows))


def _trainer(job: Job, gate: Gate, own_order: bool, compiled: bool, **more) -> Trainer:
    on_gpu = job.device.type == "cuda"
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=job.run.micro_batch,
        per_device_eval_batch_size=job.run.micro_batch,
        gradient_accumulation_steps=job.turns,
        max_steps=job.steps,
        learning_rate=job.optim.lr,
        lr_scheduler_type="cosine_with_min_lr" if job.optim.schedule == "cosine" else job.optim.schedule,
        lr_scheduler_kwargs={"min_lr_rate": job.optim.min_lr} if job.optim.schedule == "cosine" else None,
        warmup_steps=job.optim.warmup,
        weight_decay=job.optim.weight_decay,
        adam_beta1=job.optim.betas[0],
        adam_beta2=job.optim.betas[1],
        max_grad_norm=job.optim.clip,
        optim="adamw_torch_fused",
        train_sampling_strategy="random" if own_order else "sequential",
        bf16=job.bf16,
        torch_compile=compiled,
        use_cpu=not on_gpu,
        seed=job.run.seed,
        logging_steps=job.run.log_every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
        dataloader_num_workers=job.loading.get("num_workers", 0),
        remove_unused_columns=False,
    )
    # Counted on the micro-batches of the first step, because a callback does not get them.
    firsts = [job.collate([job.rows[i] for i in range(job.run.micro_batch)])]
    items = job.items(firsts[0]) * job.turns

    class Ours(Trainer):
        """Trainer with its documented override for a loss that the model does not return."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return job.loss(model, inputs)

    returns_loss = "labels" in firsts[0] and "pixel_values" not in firsts[0]
    trainer = (Trainer if returns_loss else Ours)(
        model=job.model,
        args=settings,
        train_dataset=job.rows,
        data_collator=job.collate,
        callbacks=[_Turns(gate, items)],
        **more,
    )
    if not returns_loss:  # a mean over the micro-batch, which Trainer must divide by the number of micro-batches
        trainer.model_accepts_loss_kwargs = False
    return trainer
