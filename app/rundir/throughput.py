"""Tokens per second, and the share of the hardware's peak that a run uses (MFU)."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Keys of a line in metrics.jsonl that depend on the clock, and so differ between two otherwise equal runs.
SPEEDS = ("samples_per_second", "tokens_per_second", "mfu")

# Dense peaks in TFLOP/s from NVIDIA's data sheets, the first pattern that fits a device's name: on tensor cores for
# bf16 (None: it has none for that type), and of plain fp32, which torch computes in unless told otherwise.
_PEAKS = (
    (r"H200|GH200|H100 80GB HBM3|H100 SXM", 989.4, 66.9),
    (r"H100 PCIe", 756.0, 51.2),
    (r"A100", 311.9, 19.5),
    (r"L40S", 362.1, 91.6),
    (r"\bL4\b", 121.0, 30.3),
    (r"\bA10\b", 125.0, 31.2),
    (r"V100-SXM", None, 15.7),
    (r"Tesla T4", None, 8.1),
)


def peak_flops(device: str, precision: str) -> float | None:
    """Return the most floating-point operations per second that a device can do; None where that is not known."""
    for pattern, bf16, fp32 in _PEAKS:
        if re.search(pattern, device):
            peak = {"bf16": bf16, "fp32": fp32}.get(precision)
            return peak and peak * 1e12
    return None


@dataclass(frozen=True)
class Cost:
    """What one sample costs: tokens, and floating-point operations of its forward and backward pass."""

    tokens: int
    flops: float

    @classmethod
    def of(cls, model: "PreTrainedModel", tokens: int) -> "Cost":
        """Count the cost of a transformer's sample with `tokens` tokens.

        Follows the PaLM paper (Chowdhery et al. 2022, appendix B). Each weight takes a multiplication and an addition
        per token in the forward pass, again for the gradient of its input, and again for its own gradient if it is
        trained; the products inside attention are added. Recomputation does not count, nor do embeddings that are only
        looked up.
        """
        from torch import nn

        config = model.config.get_text_config()
        parameters = dict(model.named_parameters())
        looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        ends = getattr(model, "get_output_embeddings", lambda: None)()
        looked_up.discard(id(getattr(ends, "weight", None)))
        weights = [p for p in parameters.values() if p.ndim >= 2 and id(p) not in looked_up]
        passes = sum((6 if p.requires_grad else 4) * p.numel() for p in weights)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention = 12 * config.num_hidden_layers * config.num_attention_heads * width * tokens
        return cls(tokens, float(passes + attention) * tokens)

    def speeds(self, samples_per_second: float, peak: float | None) -> dict[str, float]:
        """Return tokens per second; and MFU, where the peak of all devices together is known."""
        speeds = {"tokens_per_second": samples_per_second * self.tokens}
        return speeds | ({"mfu": samples_per_second * self.flops / peak} if peak else {})
