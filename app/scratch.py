"""The shape of a transformer that is trained from scratch."""

import math
from dataclasses import dataclass
from typing import Literal

from app.errors import UserError


@dataclass
class Scratch:
    """The shape of a model that is trained from scratch."""

    layers: int = 2
    """Transformer layers."""
    width: int = 128
    """Width of the hidden states."""
    heads: int = 2
    """Attention heads; they divide the width."""
    vocab: int = 8192
    """Tokens of the tokenizer, which is trained on the training texts."""
    dropout: float = 0.1
    """Dropout of hidden states and attention."""


@dataclass
class DecoderScratch(Scratch):
    """The shape of a language model that is trained from scratch."""

    shape: Literal["llama", "gpt2"] = "llama"
    """llama: rotary positions, RMSNorm, gated feed-forward. gpt2: learnt positions, LayerNorm, GELU."""
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 0
    """Heads of keys and values, of a llama; they divide the heads. 0: as many."""
    tokenizer: Literal["bpe", "byte"] = "bpe"
    """bpe: byte pairs, trained on the training texts, --scratch.vocab tokens. byte: each byte is a token; of ASCII
    text, each character."""
    vocab: int = 4096
    tied: bool = True
    """One matrix embeds tokens and predicts them."""
    bias: bool = True
    """Biases of a gpt2's layers and norms; a llama has none."""
    dropout: float = 0.0
    """Dropout; of a llama, of attention alone."""


def decoder(size: DecoderScratch, tokenizer, block: int):
    """Build a language model of this shape for blocks of so many tokens, with weights drawn at random."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    names = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": size.tied,
    }
    if size.shape == "llama":
        shape = LlamaConfig(
            hidden_size=size.width,
            # Three matrices of 8/3 of the width have the weights of two of four times the width.
            intermediate_size=64 * math.ceil(size.width / 24),
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads or size.heads,
            max_position_embeddings=block,
            attention_dropout=size.dropout,
            **names,
        )
        return LlamaForCausalLM(shape)
    shape = GPT2Config(
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=block,
        activation_function="gelu",  # on CPU twice as fast as its approximation by tanh
        embd_pdrop=size.dropout,
        attn_pdrop=size.dropout,
        resid_pdrop=size.dropout,
        **names,
    )
    model = GPT2LMHeadModel(shape)
    for name, parameter in model.named_parameters():
        # transformers' GPT-2 has biases always; they begin as 0, and frozen stay so.
        parameter.requires_grad_(size.bias or not name.endswith("bias"))
    return model


def check_shape(size: Scratch) -> None:
    """Refuse numbers that no model can have; what the vocabulary must hold is known where it is made."""
    for name in ("layers", "width", "heads"):
        if (value := getattr(size, name)) < 1:
            raise UserError(f"--scratch.{name} {value}: must be at least 1")
    if size.width % size.heads:
        raise UserError(
            f"--scratch.heads {size.heads} does not divide --scratch.width {size.width}: give one that does"
        )
    kv_heads = getattr(size, "kv_heads", 0)
    if kv_heads < 0 or (kv_heads and size.heads % kv_heads):
        raise UserError(
            f"--scratch.kv-heads {kv_heads} does not divide --scratch.heads {size.heads}: give one that does"
        )
    if not 0 <= size.dropout < 1:
        raise UserError(f"--scratch.dropout {size.dropout}: must be at least 0 and below 1")
