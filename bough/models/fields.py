"""What the fields of a config.json may hold.

The table is what stands between a file that anyone may have edited and the arithmetic of the models: a field that a
model reads has a rule here, so a wrong one is refused by name where it is read. The bounds are far above any real
model; they keep a typing error from becoming an overflow or an endless loop. Fields that no model reads have no rule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """Which values a field may have, and how an error says so."""

    allows: Callable[[Any], bool]
    said: str


def whole(low: int, high: int) -> Rule:
    return Rule(lambda value: type(value) is int and low <= value <= high, f"a whole number from {low:,} to {high:,}")


def number(above: float, most: float) -> Rule:
    return Rule(
        lambda value: type(value) in (int, float) and above < value <= most,
        f"a number above {above:g} and at most {most:g}",
    )


def several(rule: Rule, said: str) -> Rule:
    return Rule(lambda value: type(value) is list and all(map(rule.allows, value)), f"a list of {said}")


SIZE = whole(1, 1_000_000)  # one side of a tensor
COUNT = whole(1, 10_000)  # of heads, experts, taps
LAYERS = whole(1, 1_000)
INDEX = whole(0, 1_000)  # of a layer
LENGTH = whole(1, 2**40)  # in tokens
TOKEN = whole(0, 1_000_000)
POSITIVE = number(0, 1e18)
FLAG = Rule(lambda value: type(value) is bool, "true or false")
NAME = Rule(lambda value: type(value) is str, "a string")
TOKENS = Rule(lambda value: TOKEN.allows(value) or several(TOKEN, "").allows(value), "a token id or a list of them")
FLAG_OR_NAME = Rule(lambda value: type(value) in (bool, str), "true, false or a string")

_NAMES_BY_RULE: list[tuple[Rule, str]] = [
    (SIZE, "hidden_size vocab_size intermediate_size head_dim global_head_dim block_multiple_of"),
    (SIZE, "moe_intermediate_size shared_expert_intermediate_size vocab_size_per_layer_input"),
    (SIZE, "linear_key_head_dim linear_value_head_dim"),
    (SIZE, "backbone_hidden_size num_centroids centroid_intermediate_top_k"),
    (whole(0, 1_000_000), "hidden_size_per_layer_input"),
    (LAYERS, "num_hidden_layers decoder_sparse_step full_attention_interval sliding_window_pattern"),
    (COUNT, "num_attention_heads num_key_value_heads num_global_key_value_heads"),
    (COUNT, "linear_num_key_heads linear_num_value_heads linear_conv_kernel_dim conv_L_cache"),
    (COUNT, "num_experts num_experts_per_tok top_k_experts"),
    (INDEX, "max_window_layers num_kv_shared_layers num_dense_layers"),
    (LENGTH, "max_position_embeddings sliding_window original_max_position_embeddings"),
    (POSITIVE, "rms_norm_eps norm_eps query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping"),
    (POSITIVE, "factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale mscale_all_dim"),
    (number(0, 1000), "block_ffn_dim_multiplier routed_scaling_factor"),
    (number(1, 1e18), "rope_theta rope_local_base_freq"),
    (number(0, 1), "partial_rotary_factor"),
    (FLAG, "tie_word_embeddings attention_bias mlp_bias use_sliding_window conv_bias block_auto_adjust_ff_dim"),
    (FLAG, "attention_k_eq_v use_double_wide_mlp enable_moe_block norm_topk_prob truncate use_ordered_embeddings"),
    (FLAG, "use_expert_bias"),
    (FLAG_OR_NAME, "use_bidirectional_attention"),
    (NAME, "model_type hidden_act hidden_activation rope_type type dtype torch_dtype"),
    (several(NAME, "strings"), "layer_types"),
    (several(INDEX, "layer numbers"), "full_attn_idxs mlp_only_layers"),
    (several(POSITIVE, "numbers above 0"), "divisors"),
    (TOKENS, "eos_token_id"),
]
RULES = {name: rule for rule, names in _NAMES_BY_RULE for name in names.split()}

# Fields that hold fields in turn.
OBJECTS = {"text_config", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention", "per_layer_config"}
OBJECTS |= {"quantization_config"}

# Pairs of fields of which the second must be a multiple of the first, and those of which it must be at least as large.
MULTIPLES = [("num_key_value_heads", "num_attention_heads"), ("linear_num_key_heads", "linear_num_value_heads")]
AT_LEAST = [
    ("num_experts_per_tok", "num_experts"),
    ("top_k_experts", "num_experts"),
    ("centroid_intermediate_top_k", "num_centroids"),
]
