"""The configuration that comes with a foreign checkpoint: what it must say, what it may not, what is compared.

Tensors say the sizes. What they do not say (epsilon, RoPE's base, tying, experts per token, windows) has to stand in
the file: the projects' defaults differ from one another, and a wrong one gives a model that runs and is worse.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vha_paddle.errors import UserError

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 4 << 20

# Each key, the values with which the model is one that this package computes, and what another value would mean.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "rotary_interleaved": ((False, None), "RoPE turns even and odd channels together, here the halves of a head"),
    "rotary_percent": ((1.0, None), "RoPE turns a part of each head only"),
    "partial_rotary_factor": ((1.0, None), "RoPE turns a part of each head only"),
    "rope_scaling": ((None,), "positions are scaled"),
    "rope_type": (("rope", "default", None), "positions are scaled"),
    "position_embedding_type": (("rope", None), "positions do not enter by RoPE"),
    "no_rope_freq": ((None,), "some layers have no RoPE"),
    "qk_norm_type": (("per_head", None), "a norm over all heads together does not commute with heads that are folded"),
    "qk_l2_norm": ((False, None), "queries and keys are divided by their length, without weights"),
    "vha_shared_kv": ((False, None), "one tensor is key, rotated, and value: no grouped attention computes that"),
    "multi_latent_attention": ((False, None), "VHA's names mean something else on latent attention"),
    "experimental_attention_variant": ((None,), "VHA's names mean something else there"),
    "use_vha_premix": ((False, None), "a Premix of latent groups, not of heads"),
    "vha_postmix_grouped": ((False, None), "Postmix mixes within groups of heads only"),
    "use_vha_attention": ((True, None), "the tensors are those of VHA"),
    "attn_type": (("vha", None), "the tensors are those of VHA"),
    "gpt_model_use_experimental_version": ((False, None), "qkv_proj holds all queries, then all keys, then all values"),
    "head_wise_swa_ratio": ((0.0, None), "some heads of a layer have a window and others none"),
    "softmax_scale": ((None,), "scores are scaled by something else than 1 / sqrt(head_dim)"),
    "apply_query_key_layer_scaling": ((False, None), "scores are scaled by the layer's number"),
    "hidden_act": (("silu", "swish", None), "the feed-forward is no SwiGLU"),
    "gated_linear_unit": ((True, None), "the feed-forward is no SwiGLU"),
    "glu_linear_offset": ((0.0, None), "the feed-forward is no SwiGLU"),
    "activation_func_clamp_value": ((None,), "the feed-forward is no SwiGLU"),
    "swiglu_limit": ((None,), "the feed-forward is no SwiGLU"),
    "mlp_bias": ((False, None), "projections of the feed-forward have biases"),
    "normalization": (("RMSNorm", None), "the norms are others"),
    "layernorm_zero_centered_gamma": ((False, None), "1 is added to the norms' weights"),
    "apply_residual_connection_post_layernorm": ((False, None), "the residual stream is another"),
    "block_attention_residuals": ((False, None), "the residual stream is another"),
    "enable_hyper_connections": ((False, None), "the residual stream is another"),
    "enable_hy_sparse_attention": ((False, None), "attention is sparse"),
    "multimax_modules": ((None, []), "the softmax is another"),
    "n_group": ((None, 0, 1), "experts are chosen by group"),
    "topk_group": ((None, 0, 1), "experts are chosen by group"),
    "routed_scaling_factor": ((None, 1.0), "the experts' outputs are scaled"),
    "routed_scaling_factor_learnable": ((False, None), "the experts' outputs are scaled"),
    "moe_shared_expert_gate": ((False, None), "the shared expert has a gate"),
    "moe_latent_size": ((None, 0), "experts work in a latent space"),
    "moe_n_hash_layers": ((None, 0), "tokens go to experts by a table"),
    "moe_split_feature_routing": ((False, None), "a router has two projections"),
    "moe_expert_capacity_factor": ((None,), "experts drop tokens"),
}
# Keys that are read, or compared with the tensors, elsewhere.
_READ = frozenset(
    "rms_norm_eps layernorm_epsilon qk_norm_eps rope_theta rope_parameters tie_word_embeddings max_position_embeddings "
    "initializer_range init_method_std vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim v_head_dim vha_q_lora_rank vha_postmix_rank swa_vha_q_lora_rank swa_vha_postmix_rank "
    "swa_head_dim swa_v_head_dim swa_num_attention_heads swa_num_key_value_heads swa_rope_theta sliding_window "
    "use_sliding_window window_attn_skip_freq add_swa_attention_sink_bias add_full_attention_sink_bias softmax_type "
    "vha_enable_premix vha_enable_postmix gated_attention use_gated_attn use_qk_norm use_bias attention_bias "
    "attention_value_scale num_empty_layers_add_in_head num_nextn_predict_layers num_mtp_modules n_routed_experts "
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob scoring_func topk_method "
    "n_shared_experts router_aux_loss_coef first_k_dense_replace moe_layer_freq using_sonic_moe moe_expert_fusion "
    "rotary_dim layer_types".split()
)
# Keys that say nothing of what the layers compute: tokens, dtypes, initialisation, training and how it is spread.
_IRRELEVANT = frozenset(
    "architectures model_type auto_map dtype torch_dtype params_dtype bf16 fp16 use_cache transformers_version "
    "paddleformers_version bos_token_id eos_token_id pad_token_id unk_token_id vha_premix_init_alpha "
    "attention_dropout hidden_dropout hidden_dropout_prob initializer_factor output_router_logits router_z_loss_coef "
    "seq_length max_sequence_length moe_token_dispatcher_type moe_router_load_balancing_type "
    "num_empty_layers_add_in_tail max_window_layers pretraining_tp rotary_base dpo_config fuse_rms_norm "
    "apply_rope_fusion qk_norm_fusion _attn_implementation".split()
)


class UpstreamConfig:
    """The values of one file."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            UserError: it cannot be read, is no JSON object, or describes a model that this package does not compute.
        """
        self.path = path
        self.values = _read(path)
        for key, (allowed, meaning) in _ONLY.items():
            if key in self.values and not any(_equal(self.values[key], value) for value in allowed):
                shown = " or ".join(json.dumps(value) for value in allowed if value is not None) or "null"
                raise self.refusal(key, f"{meaning}; only {shown} can be read")
        parameters = self.values.get("rope_parameters")
        if isinstance(parameters, dict) and parameters.get("rope_type", "default") != "default":
            raise self.refusal("rope_parameters", "positions are scaled; only rope_type default can be read")

    def refusal(self, key: str, rule: str) -> UserError:
        return UserError(f"{self.path}: {key}={json.dumps(self.values.get(key))}: {rule}")

    def get(self, key: str) -> Any:
        """A value; None where the key is absent or null, which mean the same."""
        return self.values.get(key)

    def require(self, key: str, why: str) -> Any:
        """
        Raises:
            UserError: the file does not say it.
        """
        value = self.get(key)
        if value is None:
            raise UserError(f"{self.path}: {key} is missing: {why}; add it as the training had it")
        return value

    def number(self, key: str, why: str) -> float:
        """A required number above zero. Raises as `require`."""
        value = self.require(key, why)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.refusal(key, "must be a number above 0")
        return float(value)

    def count(self, key: str, why: str) -> int:
        """A required whole number above zero. Raises as `require`."""
        value = self.number(key, why)
        if not value.is_integer() or value >= 2**63:
            raise self.refusal(key, "must be a whole number below 2^63")
        return int(value)

    def flag(self, key: str) -> bool | None:
        """True, false, or None where the file says nothing.

        Raises:
            UserError: another value.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(key, "must be true or false")
        return value

    def agree(self, key: str, found: Any, where: str) -> None:
        """Require that the file, if it has the key, says what was found.

        Args:
            where: what it was found in.

        Raises:
            UserError: it says something else.
        """
        value = self.get(key)
        if value is not None and not _equal(value, found):
            raise self.refusal(key, f"{where} say {json.dumps(found)}; the configuration belongs to another model")

    @property
    def rope_theta(self) -> float:
        """Raises as `require`."""
        parameters = self.get("rope_parameters")
        if self.get("rope_theta") is None and isinstance(parameters, dict) and "rope_theta" in parameters:
            return float(parameters["rope_theta"])
        return self.number("rope_theta", "the base of RoPE; PaddleFleet's default is 1e4, Qwen3's 1e6")

    @property
    def unknown(self) -> list[str]:
        """Keys that nothing here looks at."""
        return sorted(set(self.values) - set(_ONLY) - _READ - _IRRELEVANT)


def find_config(given: Path | None, folders: list[Path]) -> Path | None:
    """The file that was given, or that of the folder that was; else the first folder's `config.json`."""
    if given is not None:
        return given / CONFIG_FILE if given.is_dir() else given
    return next((folder / CONFIG_FILE for folder in folders if (folder / CONFIG_FILE).is_file()), None)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UserError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes, so not a configuration; give a config.json")
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); give the config.json of the training") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object; give the config.json of the training")
    return values


def _equal(value: Any, other: Any) -> bool:
    """Equal, with true and 1 told apart."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
