"""The `transformers` families with routed experts, each with a configuration of a few kilobytes.

A row names the class that a checkpoint of the family loads as and what its
configuration needs beyond the sizes in `tiny_sizes`; `tiny_checkpoints` makes a checkpoint of it.
"""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Latent attention has one key per query head.
ALL_HEADS = {"num_key_value_heads": 4}
ONE_DENSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
LINEAR_THEN_INDEXED = {"layer_types": ["linear_attention", "linear_attention", "indexed_attention"]}
SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
ALL_INDEXED = {"layer_types": ["indexed_attention"] * 3}
GEMMA4 = {
    "enable_moe_block": True,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    **SLIDING_THEN_FULL,
}
QWEN4 = {
    "hc_count": 2,
    "hc_lowrank": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    **LINEAR_THEN_INDEXED,
}
# The middle one of three layers runs twice.
LOOP = {
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 2,
    "loop_num_passes": 2,
    "loop_gate_rank": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Family:
    """One model family."""

    folder: str  # the family's folder under `models` in `transformers`
    model_class: str  # name in `transformers` of the class a checkpoint of this family loads as
    # overrides for the configuration, nested for sub-configurations
    config: dict[str, Any] = field(default_factory=dict)
    part: str = ""  # attribute of the model that takes token ids; empty if the model itself does
    # token ids the forward pass needs beyond the prompt, by argument name
    inputs: dict[str, list[int]] = field(default_factory=dict)
    decodes: bool = True  # whether a second step can be run with the cache of the first

    @property
    def computes_in_bf16(self) -> bool:
        """Whether the installed `transformers` can: what it cannot, it refuses in its products."""
        return not (is_oldest_version() and str(self) in FP32_ONLY_IN_5_17)

    def __str__(self) -> str:
        return self.model_class


def of_installed_version(families: Sequence[Family]) -> list[Family]:
    """Those that the installed `transformers` has: the oldest that we work with has fewer."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    models = Path(spec.origin).parent / "models"
    found = [family for family in families if (models / family.folder).is_dir()]
    version = importlib.metadata.version("transformers")
    left_out = NOT_IN_5_17 if is_oldest_version() else CANNOT_RUN.get(version, set())
    return [family for family in found if str(family) not in left_out]


def is_oldest_version() -> bool:
    """Whether the installed `transformers` is the oldest that we work with."""
    return importlib.metadata.version("transformers").startswith("5.17.")


NOT_IN_5_17 = {
    # without the experts interface
    *("AriaTextForCausalLM", "AriaForConditionalGeneration"),
    # with configurations of another form
    *("Glm5NextForConditionalGeneration", "MiniMaxM3SparseForConditionalGeneration"),
    *("Qwen3OmniMoeForConditionalGeneration", "Qwen4ExpForCausalLM"),
    "Qwen4ExpForConditionalGeneration",
}
"""Families that the oldest `transformers` builds otherwise: there they are refused, or not made."""

CANNOT_RUN = {"5.24.0": {"Llama4ForConditionalGeneration"}}
"""Families that a version of `transformers` makes, and whose `forward` fails there."""

FP32_ONLY_IN_5_17 = {"DeepseekV4ForCausalLM"}
"""Its norms, whose weights stay in fp32, gave fp32 to products with weights in bf16."""


# Every family that `transformers` builds with its experts interface. Where a family can be loaded
# as a text model and as a whole with towers, both are here: their checkpoints name keys
# differently.
TABLE = [
    Family("afmoe", "AfmoeForCausalLM"),
    Family("aria", "AriaTextForCausalLM"),
    Family(
        "aria",
        "AriaForConditionalGeneration",
        {
            "vision_config": {"model_type": "idefics3_vision"},
            "projector_patch_to_query_dict": {16: 4},
        },
    ),
    Family("axk1", "AXK1ForCausalLM", ALL_HEADS),
    Family("axk2", "AXK2ForCausalLM", ALL_HEADS),
    Family("bailing_hybrid", "BailingHybridForCausalLM", ALL_HEADS | LINEAR_THEN_FULL),
    Family("beam", "BeamForCausalLM", ONE_DENSE),
    Family("cohere2_moe", "Cohere2MoeForCausalLM"),
    Family(
        "deepseek_ocr2",
        "DeepseekOcr2ForConditionalGeneration",
        {"text_config": ALL_HEADS | ONE_DENSE},
    ),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", ALL_HEADS),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", ALL_HEADS),
    Family("deepseek_v32", "DeepseekV32ForCausalLM", ALL_HEADS),
    Family(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        {"num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 8},
    ),
    Family(
        "diffusion_gemma",
        "DiffusionGemmaForBlockDiffusion",
        {
            "text_config": {"global_head_dim": 16, **SLIDING_THEN_FULL},
            "vision_config": {"model_type": "gemma4_vision"},
            "canvas_length": 8,
        },
        # Without a canvas it draws one at random; it refines a canvas instead of decoding.
        inputs={"decoder_input_ids": [3, 1, 4, 1, 5, 9, 2, 6]},
        decodes=False,
    ),
    Family("dots1", "Dots1ForCausalLM"),
    Family("dots3_note", "Dots3NoteForCausalLM", ALL_HEADS | ALL_INDEXED),
    Family(
        "dots3_note",
        "Dots3NoteForConditionalGeneration",
        {"text_config": ALL_HEADS | ALL_INDEXED, "vision_config": ONE_DENSE},
    ),
    Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    Family(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeForConditionalGeneration",
        # Text and picture experts of different width.
        {
            "text_config": {
                "moe_intermediate_size": [24, 16],
                "rope_parameters": ROPE | {"mrope_section": [1, 1, 2]},
            }
        },
    ),
    Family("exaone_moe", "ExaoneMoeForCausalLM"),
    Family("flex_olmo", "FlexOlmoForCausalLM"),
    Family("flint", "FlintForCausalLM", {"mlp_only_layers": [0]}),
    Family("gemma4", "Gemma4ForCausalLM", GEMMA4),
    Family(
        "gemma4", "Gemma4ForConditionalGeneration", {"text_config": GEMMA4, "audio_config": None}
    ),
    Family("glm4_moe", "Glm4MoeForCausalLM"),
    Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", ALL_HEADS),
    Family(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": {
                "rope_parameters": ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}
            }
        },
    ),
    Family(
        "glm5_next",
        "Glm5NextForConditionalGeneration",
        {
            "text_config": {
                "qk_rope_head_dim": 0,
                "index_kpool": 2,
                **ALL_HEADS,
                **ONE_DENSE,
                **LINEAR_THEN_INDEXED,
            }
        },
    ),
    Family("glm_moe_dsa", "GlmMoeDsaForCausalLM", ALL_HEADS),
    Family("gpt_oss", "GptOssForCausalLM"),
    Family("granitemoe", "GraniteMoeForCausalLM"),
    Family("granitemoe_swa", "GraniteMoeSWAForCausalLM"),
    Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", LINEAR_THEN_FULL),
    Family("granitemoeshared", "GraniteMoeSharedForCausalLM"),
    Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
    Family("hy_v3", "HYV3ForCausalLM"),
    Family("hy_v4", "HYV4ForCausalLM"),
    Family(
        "hy_v4_vl",
        "HYV4VLForConditionalGeneration",
        {"text_config": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}},
    ),
    Family("inkling", "InklingForCausalLM"),
    Family("inkling", "InklingForConditionalGeneration"),
    Family("inkling2", "Inkling2ForCausalLM"),
    Family("inkling2", "Inkling2ForConditionalGeneration"),
    Family("inkling2_loop", "Inkling2LoopForCausalLM", LOOP),
    Family(
        "inkling2_loop",
        "Inkling2LoopForConditionalGeneration",
        {"text_config": LOOP, "vision_config": {"model_type": "inkling2_vision"}},
    ),
    Family(
        "jamba",
        "JambaForCausalLM",
        {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 2},
    ),
    # The text model of another family inside a wrapper.
    Family(
        "kimi_k25",
        "Kimi_K25ForConditionalGeneration",
        {"text_config": {"model_type": "deepseek_v3", **ALL_HEADS}},
    ),
    Family("kimi_linear", "KimiLinearForCausalLM", ALL_HEADS | LINEAR_THEN_FULL | ONE_DENSE),
    Family("kolibri1", "Kolibri1ForCausalLM"),
    Family("laguna", "LagunaForCausalLM"),
    Family(
        "lara_mini",
        "LaraMiniForCausalLM",
        {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
    ),
    Family("lfm2_moe", "Lfm2MoeForCausalLM", {"layer_types": ["conv", "conv", "full_attention"]}),
    Family("mellum", "MellumForCausalLM"),
    Family("mimo_v2_flash", "MiMoV2FlashForCausalLM"),
    Family("minimax", "MiniMaxForCausalLM"),
    Family("minimax_m2", "MiniMaxM2ForCausalLM"),
    Family("minimax_m3_vl", "MiniMaxM3VLForCausalLM"),
    Family("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration"),
    Family("mistral4", "Mistral4ForCausalLM", ALL_HEADS),
    Family(
        "mistral_large4",
        "MistralLarge4ForConditionalGeneration",
        {"text_config": ALL_HEADS, "vision_config": {"model_type": "pixtral"}},
    ),
    Family("mixtral", "MixtralForCausalLM"),
    Family(
        "muse_spark",
        "MuseSparkForConditionalGeneration",
        {
            "audio_config": {
                "num_hidden_layers": 1,
                "patch_sizes": [4],
                "hidden_sizes": [8],
                "depths": [1],
            }
        },
    ),
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    ),
    Family("olmoe", "OlmoeForCausalLM"),
    Family("openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification", decodes=False),
    Family("phimoe", "PhimoeForCausalLM"),
    Family("qwen2_moe", "Qwen2MoeForCausalLM"),
    Family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", LINEAR_THEN_FULL),
    Family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", {"text_config": LINEAR_THEN_FULL}),
    Family("qwen3_moe", "Qwen3MoeForCausalLM"),
    Family("qwen3_next", "Qwen3NextForCausalLM", LINEAR_THEN_FULL),
    Family("qwen3_omni_moe", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    Family(
        "qwen3_omni_moe",
        "Qwen3OmniMoeForConditionalGeneration",
        {
            "talker_config": {
                "spatial_merge_size": 2,
                "text_config": {"shared_expert_intermediate_size": 24},
            },
            "code2wav_config": {"codebook_size": 16, "decoder_dim": 32},
        },
        part="thinker",
    ),
    Family("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    Family("qwen4_exp", "Qwen4ExpForCausalLM", QWEN4),
    Family("qwen4_exp", "Qwen4ExpForConditionalGeneration", {"text_config": QWEN4}),
    Family("solar_open", "SolarOpenForCausalLM"),
    Family("unlimited_ocr", "UnlimitedOcrForConditionalGeneration"),
    Family("zaya", "ZayaForCausalLM", {"num_experts_per_tok": 1, "router_hidden_size": 8}),
]
FAMILIES = of_installed_version(TABLE)

# Families without the experts interface that the runtime has an adapter for.
ADAPTED = of_installed_version(
    [
        Family("jetmoe", "JetMoeForCausalLM", {"kv_channels": 8}),
        Family(
            "llama4", "Llama4ForCausalLM", {"intermediate_size_mlp": 48, "num_experts_per_tok": 1}
        ),
        Family(
            "llama4",
            "Llama4ForConditionalGeneration",
            {
                "text_config": {"intermediate_size_mlp": 48, "num_experts_per_tok": 1},
                "vision_config": {
                    "vision_output_dim": 32,
                    "projector_input_dim": 32,
                    "projector_output_dim": 32,
                },
            },
        ),
        Family(
            "longcat_flash",
            "LongcatFlashForCausalLM",
            {
                "num_layers": 1,
                "ffn_hidden_size": 48,
                "expert_ffn_hidden_size": 24,
                "zero_expert_num": 2,
                **ALL_HEADS,
            },
        ),
    ]
)

# Families that have routed experts but do not build them with the experts interface: the runtime
# has no adapter for them and must say so.
UNSUPPORTED = of_installed_version(
    [
        Family(
            "dbrx",
            "DbrxForCausalLM",
            {
                "n_layers": 2,
                "n_heads": 4,
                "attn_config": {"rope_theta": 10000.0},
                "ffn_config": {"ffn_hidden_size": 24},
            },
        ),
        Family(
            "nllb_moe",
            "NllbMoeForConditionalGeneration",
            {
                "decoder_layers": 2,
                "encoder_layers": 2,
                "decoder_attention_heads": 2,
                "decoder_ffn_dim": 32,
                "encoder_sparse_step": 2,
                "decoder_sparse_step": 2,
            },
        ),
        Family(
            "step3p7",
            "Step3p7ForConditionalGeneration",
            {
                "text_config": {
                    "share_expert_dim": 24,
                    "mlp_layer_types": ["dense", "sparse", "sparse"],
                }
            },
        ),
        Family(
            "switch_transformers",
            "SwitchTransformersForConditionalGeneration",
            {
                "d_kv": 8,
                "d_ff": 32,
                "num_layers": 2,
                "num_decoder_layers": 2,
                "num_sparse_encoder_layers": 1,
                "num_sparse_decoder_layers": 1,
            },
        ),
    ]
)
