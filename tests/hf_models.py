"""Small random models that transformers makes and writes: what an import starts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from tests.hf_tokenizers import write_qwen_tokenizer

VOCABULARY = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 3e4,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
}
_DENSE = _SIZES | {"intermediate_size": 28}
_MIXTURE = _SIZES | {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "router_aux_loss_coef": 2e-3,
}
_HYBRID = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
CONFIGS: dict[str, Any] = {
    "Qwen3": Qwen3Config(**_DENSE),
    "Qwen3, tied": Qwen3Config(**_DENSE | {"tie_word_embeddings": True}),
    "Qwen3, biases": Qwen3Config(**_DENSE, attention_bias=True),
    "Qwen3, hybrid": Qwen3Config(**_DENSE | _HYBRID),
    "Qwen3-MoE": Qwen3MoeConfig(**_MIXTURE, norm_topk_prob=True),
    "Qwen3-MoE, shares not divided": Qwen3MoeConfig(**_MIXTURE, norm_topk_prob=False),
    "Llama": LlamaConfig(**_DENSE),
    "Llama, no head_dim, MHA, biases": LlamaConfig(
        **_DENSE | {"head_dim": None, "num_key_value_heads": None, "attention_bias": True}
    ),
}


def write_model(directory: Path, case: str, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """Write a directory with weights of a size at which every tensor tells, and a tokenizer; gives the model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[case])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(torch.exp(0.3 * torch.randn_like(parameter)))
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model = model.to(dtype).eval()
    model.save_pretrained(directory, **options)
    write_qwen_tokenizer(directory)
    return model


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def as_transformers_5_writes(directory: Path) -> None:
    """Give config.json the keys of transformers 5 in place of those of transformers 4."""
    path = directory / "config.json"
    values = json.loads(path.read_text())
    values["dtype"] = values.pop("torch_dtype")
    values["rope_parameters"] = {"rope_theta": values.pop("rope_theta"), "rope_type": "default"}
    values.pop("rope_scaling", None)
    if "num_experts" in values:
        values["num_local_experts"] = values.pop("num_experts")
        values.pop("head_dim", None)
    path.write_text(json.dumps(values))
