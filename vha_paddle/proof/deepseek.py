"""config.json of a DeepSeek class as this package writes it, as our `model` section."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vha_paddle.config import Model
from vha_paddle.errors import UserError
from vha_paddle.export.stock import LATENT, LATENT_MIXTURE
from vha_paddle.sources.hf_config import COPIED

MODEL_TYPES = (LATENT.model_type, LATENT_MIXTURE.model_type)

_COPIED = (*COPIED, "rope_theta")
_ATTENTION = (
    "num_attention_heads",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def deepseek_model(values: Mapping[str, Any], path: Path) -> Model:
    """The model section.

    Args:
        values: of config.json.
        path: of the file, for errors.

    Raises:
        UserError: a key is missing or holds what it cannot.
    """
    try:
        section: dict[str, Any] = {key: values[key] for key in _COPIED}
        section["attention"] = {"kind": "mla"} | {key: values[key] for key in _ATTENTION}
        if values["model_type"] == LATENT.model_type:
            section["intermediate_size"] = values["intermediate_size"]
        else:
            section["experts"] = {
                "num_experts": values["n_routed_experts"],
                "num_experts_per_tok": values["num_experts_per_tok"],
                "moe_intermediate_size": values["moe_intermediate_size"],
                "shared_expert_intermediate_size": values["n_shared_experts"] * values["moe_intermediate_size"],
                "norm_topk_prob": values["norm_topk_prob"],
                "router_aux_loss_coef": values["aux_loss_alpha"],
            }
        return Model.model_validate(section)
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing; export the model again") from None
    except (TypeError, ValidationError) as error:
        raise UserError(f"{path}: not a DeepSeek configuration ({' '.join(str(error).split())})") from None
