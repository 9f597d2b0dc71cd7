"""Every built-in family, as data.

Checked against the stock classes of transformers 5.25: strict load and logits of the converted model against the
source with each group's heads replaced by their mean (tests/families).
"""

from gqaconvert.families.family import KV_HEADS, SHIPPED, Default, Family, Form, Layout, Part, Position

SEPARATE = {"q_proj": Part.QUERY, "k_proj": Part.KEY, "v_proj": Part.VALUE, "o_proj": Part.OUTPUT}
SHARED_NORMS = SEPARATE | {"q_norm": Part.UNTOUCHED, "k_norm": Part.KEY_NORM_SHARED}
WIDE_NORMS = SEPARATE | {"q_norm": Part.UNTOUCHED, "k_norm": Part.KEY_NORM}
DENSE = {"q_proj": Part.QUERY, "k_proj": Part.KEY, "v_proj": Part.VALUE, "dense": Part.OUTPUT}
FUSED = {"query_key_value": Part.QKV, "dense": Part.OUTPUT}
OUT_PROJ = {"q_proj": Part.QUERY, "k_proj": Part.KEY, "v_proj": Part.VALUE, "out_proj": Part.OUTPUT}

FALCON_FLAGS = {
    "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "alibi": False,
    "num_ln_in_parallel_attn": None,
}  # fmt: skip
FALCON_ONE = Form({"multi_query": True, "new_decoder_architecture": False}, frozenset({"one"}), Layout.BLOCKS)
FALCON_SOME = Form(
    {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS, "num_ln_in_parallel_attn": 1},
    frozenset({"some"}),
    Layout.GROUPS,
    requires={"parallel_attn": True},
)
FALCON_ALL = Form({"multi_query": False, "num_kv_heads": KV_HEADS}, frozenset({"all"}), Layout.GROUPS)

FALCON_CAUTION = (
    "transformers before 5.25 repeats Falcon's KV heads before it caches them, unless there is only one: with "
    "1 < KV heads < query heads the weights shrink, its cache does not"
)

CLIP_CAUTION = "clip_qkv: the mean of clipped keys is not the clipped mean of the keys"

ENCODER_CAUTION = (
    "the decoder's self-attention and cross-attention share heads, the encoder is untouched; cross-attention caches as "
    "many bytes for every token of the encoder as the self-attention for every token of the decoder"
)

NO_COUNT = "its stock class in transformers has no setting for fewer KV heads, so nothing could load the result"

NO_REMOTE_COUNT = "its publisher's code has no setting for fewer KV heads, and transformers has no class to build on"

GPT2_ONE = Form(
    {"model_type": "gpt_bigcode", "multi_query": True, "activation_function": Default("gelu_new")},
    frozenset({"one"}),
    Layout.BLOCKS,
    requires={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    classes={
        "GPT2LMHeadModel": "GPTBigCodeForCausalLM",
        "GPT2Model": "GPTBigCodeModel",
        "GPT2ForSequenceClassification": "GPTBigCodeForSequenceClassification",
        "GPT2ForTokenClassification": "GPTBigCodeForTokenClassification",
    },
    linear=r"\.(attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$",
    drops=r"\.attn\.(bias|masked_bias)$",
)
"""With one KV head, stock gpt_bigcode computes what GPT-2 does; its projections are plain linear layers."""


def _causal(name: str, head: str | None = None) -> dict[str, str]:
    return {"AutoModel": f"{name}Model", "AutoModelForCausalLM": head or f"{name}ForCausalLM"}


def _t5(model_type: str, name: str) -> Family:
    """Encoder-decoders with T5's layers: scores without a scale, a relative bias for each query head."""
    parts = {"q": Part.QUERY, "k": Part.KEY, "v": Part.VALUE, "o": Part.OUTPUT}
    return Family(
        model_type, (model_type,), parts | {"relative_attention_bias": Part.UNTOUCHED},
        stack="decoder.block", attention="layer.0.SelfAttention", cross_attention="layer.1.EncDecAttention",
        position=Position.RELATIVE, forms=(SHIPPED,), heads=("num_heads",), layers=("num_decoder_layers", "num_layers"),
        classes={"AutoModel": f"{name}Model", "AutoModelForSeq2SeqLM": f"{name}ForConditionalGeneration"},
        caution=ENCODER_CAUTION,
    )  # fmt: skip


# Whisper's config class takes num_key_value_heads for another name of encoder_attention_heads.
WHISPER = Form({"decoder_key_value_heads": KV_HEADS}, frozenset({"one", "some"}), shipped=True)


def _bart(model_type: str, name: str, auto: str = "AutoModelForSeq2SeqLM", form: Form = SHIPPED, **more: str) -> Family:
    """Encoder-decoders with Bart's layers."""
    classes = {"AutoModel": f"{name}Model", auto: f"{name}ForConditionalGeneration"} | more
    return Family(
        model_type, (model_type,), OUT_PROJ, stack="decoder.layers", cross_attention="encoder_attn",
        position=Position.LEARNED, forms=(form,), heads=("decoder_attention_heads",), layers=("decoder_layers",),
        classes=classes,
        caution=ENCODER_CAUTION,
    )  # fmt: skip


FAMILIES: tuple[Family, ...] = (
    Family("llama", ("llama",), SEPARATE, assumed_heads=32),
    Family("mistral", ("mistral",), SEPARATE, assumed_heads=32),
    Family("mixtral", ("mixtral",), SEPARATE),
    Family(
        "qwen2", ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), SEPARATE, assumed_heads=32,
    ),
    Family("qwen2_moe", ("qwen2_moe",), SEPARATE),
    Family("qwen3", ("qwen3", "qwen3_vl_text"), SHARED_NORMS),
    Family("qwen3_moe", ("qwen3_moe",), SHARED_NORMS),
    Family(
        "phi", ("phi",), DENSE | {"q_layernorm": Part.UNTOUCHED, "k_layernorm": Part.KEY_NORM_SHARED},
        rotary_fraction=0.5,
    ),
    Family("phi3", ("phi3",), {"qkv_proj": Part.QKV, "o_proj": Part.OUTPUT}, layout=Layout.BLOCKS),
    Family(
        "stablelm", ("stablelm",), SEPARATE | {"q_layernorm": Part.UNTOUCHED, "k_layernorm": Part.KEY_NORM_LIST},
        rotary_fraction=0.25,
    ),
    Family("gemma", ("gemma",), SEPARATE),
    Family("gemma2", ("gemma2",), SEPARATE, attention_adds=False),
    Family("gemma3", ("gemma3_text",), SHARED_NORMS, attention_adds=False),
    Family(
        "mllama", ("mllama_text_model",), SHARED_NORMS, cross_attention="cross_attn",
        caution="its cross-attention layers share heads too; they cache as much for every token of an image",
    ),
    Family("olmo", ("olmo",), SEPARATE, caution=CLIP_CAUTION),
    Family("olmo2", ("olmo2",), WIDE_NORMS, attention_adds=False),
    Family("olmoe", ("olmoe",), WIDE_NORMS, caution=CLIP_CAUTION),
    Family("cohere", ("cohere",), WIDE_NORMS, position=Position.ROPE_PAIRS),
    Family("cohere2", ("cohere2",), SEPARATE, position=Position.ROPE_PAIRS),
    Family("granite", ("granite",), SEPARATE, attention_adds=False),
    Family("granitemoe", ("granitemoe",), SEPARATE, attention_adds=False),
    Family("starcoder2", ("starcoder2",), SEPARATE),
    Family("nemotron", ("nemotron",), SEPARATE, rotary_fraction=0.5),
    Family("smollm3", ("smollm3",), SEPARATE),
    Family("exaone4", ("exaone4",), SHARED_NORMS, attention_adds=False),
    Family("glm", ("glm",), SEPARATE, position=Position.ROPE_PAIRS, rotary_fraction=0.5),
    Family(
        "glm4", ("glm4",), SEPARATE, position=Position.ROPE_PAIRS, rotary_fraction=0.5, attention_adds=False,
    ),
    Family("gpt_oss", ("gpt_oss",), SEPARATE | {"sinks": Part.UNTOUCHED}),
    Family("helium", ("helium",), SEPARATE, position=Position.ROPE_PAIRS),
    Family("ernie4_5", ("ernie4_5",), SEPARATE, position=Position.ROPE_PAIRS),
    Family("seed_oss", ("seed_oss",), SEPARATE),
    Family("bitnet", ("bitnet",), SEPARATE | {"attn_sub_norm": Part.UNTOUCHED}),
    Family("arcee", ("arcee",), SEPARATE),
    Family("apertus", ("apertus",), SHARED_NORMS),
    Family(
        "hunyuan_v1_dense", ("hunyuan_v1_dense",),
        SEPARATE | {"query_layernorm": Part.UNTOUCHED, "key_layernorm": Part.KEY_NORM_SHARED},
    ),
    Family(
        "falcon", ("falcon",), FUSED, stack="h", attention="self_attention", layout=Layout.GROUPS,
        forms=(Form({"num_kv_heads": KV_HEADS}),),
        when={"new_decoder_architecture": True}, defaults=FALCON_FLAGS, caution=FALCON_CAUTION,
    ),
    Family(
        "falcon-mqa", ("falcon", "RefinedWebModel"), FUSED, stack="h", attention="self_attention", layout=Layout.BLOCKS,
        forms=(FALCON_ONE, FALCON_SOME, FALCON_ALL),
        when={"new_decoder_architecture": False, "multi_query": True}, defaults=FALCON_FLAGS, caution=FALCON_CAUTION,
    ),
    Family(
        "falcon-mha", ("falcon", "RefinedWebModel"), FUSED, stack="h", attention="self_attention", layout=Layout.GROUPS,
        forms=(FALCON_ONE, FALCON_SOME, FALCON_ALL),
        when={"new_decoder_architecture": False, "multi_query": False}, defaults=FALCON_FLAGS, caution=FALCON_CAUTION,
    ),
    Family(
        "gpt_bigcode-mqa", ("gpt_bigcode",), {"c_attn": Part.QKV, "c_proj": Part.OUTPUT},
        stack="h", attention="attn", layout=Layout.BLOCKS, position=Position.LEARNED,
        forms=(
            Form({"multi_query": True}, frozenset({"one"}), Layout.BLOCKS),
            Form({"multi_query": False}, frozenset({"all"}), Layout.GROUPS),
        ),
        when={"multi_query": True}, defaults={"multi_query": True},
    ),
    Family(
        "gpt_bigcode-mha", ("gpt_bigcode",), {"c_attn": Part.QKV, "c_proj": Part.OUTPUT},
        stack="h", attention="attn", layout=Layout.GROUPS, position=Position.LEARNED,
        forms=(
            Form({"multi_query": True}, frozenset({"one"}), Layout.BLOCKS),
            Form({"multi_query": False}, frozenset({"all"}), Layout.GROUPS),
        ),
        when={"multi_query": False}, defaults={"multi_query": True},
    ),
    Family("lfm2", ("lfm2",), OUT_PROJ | {"q_layernorm": Part.UNTOUCHED, "k_layernorm": Part.KEY_NORM_SHARED}),
    Family("jamba", ("jamba",), SEPARATE, position=Position.NONE),
    Family("granitemoehybrid", ("granitemoehybrid",), SEPARATE, attention_adds=False),
    Family(
        "qwen3_next", ("qwen3_next",), SHARED_NORMS | {"q_proj": Part.QUERY_GATED}, rotary_fraction=0.25,
    ),
    Family(
        "dbrx", ("dbrx",), {"Wqkv": Part.QKV, "out_proj": Part.OUTPUT}, stack="blocks", attention="norm_attn_norm.attn",
        layout=Layout.BLOCKS, forms=(Form({"attn_config.kv_n_heads": KV_HEADS}),),
        caution="attn_config.clip_qkv: the mean of clipped keys is not the clipped mean of the keys",
    ),
    # Classes that only their publishers' own code has.
    Family(
        "internlm2", ("internlm2",), {"wqkv": Part.QKV, "wo": Part.OUTPUT}, attention="attention",
        layout=Layout.GROUPS, remote=True,
    ),
    Family(
        "chatglm", ("chatglm",), FUSED, stack="encoder.layers", attention="self_attention", layout=Layout.BLOCKS,
        position=Position.ROPE_PAIRS, rotary_fraction=0.5, remote=True,
        forms=(Form({"multi_query_attention": True, "multi_query_group_num": KV_HEADS}, frozenset({"one", "some"})),),
        when={"multi_query_attention": True}, defaults={"multi_query_attention": False},
    ),
    Family(
        "baichuan", ("baichuan",), {"W_pack": Part.QKV, "o_proj": Part.OUTPUT}, layout=Layout.BLOCKS, remote=True,
        forms=(), wasteful=NO_REMOTE_COUNT,
        caution="the 13B model has ALiBi positions, the 7B model rotary ones; its config.json does not say which",
    ),
    Family(
        "qwen", ("qwen",), {"c_attn": Part.QKV, "c_proj": Part.OUTPUT}, stack="h", attention="attn",
        layout=Layout.BLOCKS, remote=True, forms=(), wasteful=NO_REMOTE_COUNT,
    ),
    # Stock classes without a setting for fewer KV heads: the output brings a modelling file of ours.
    Family(
        "gpt_neox", ("gpt_neox",), FUSED, attention="attention", layout=Layout.GROUPS, rotary_fraction=0.25,
        forms=(SHIPPED,), classes=_causal("GPTNeoX"),
    ),
    Family(
        "gpt2", ("gpt2",), {"c_attn": Part.QKV, "c_proj": Part.OUTPUT}, stack="h", attention="attn",
        layout=Layout.BLOCKS, conv1d=frozenset(("c_attn", "c_proj")), position=Position.LEARNED,
        forms=(GPT2_ONE, SHIPPED), defaults={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        classes=_causal("GPT2", "GPT2LMHeadModel"),
    ),
    Family("opt", ("opt",), OUT_PROJ, position=Position.LEARNED, forms=(SHIPPED,), classes=_causal("OPT")),
    Family(
        "gptj", ("gptj",), OUT_PROJ, stack="h", attention="attn", position=Position.ROPE_PAIRS, forms=(SHIPPED,),
        classes=_causal("GPTJ"),
    ),
    Family(
        "bloom", ("bloom",), FUSED, stack="h", attention="self_attention", layout=Layout.GROUPS,
        position=Position.ALIBI, forms=(SHIPPED,), classes=_causal("Bloom"),
    ),
    Family(
        "mpt", ("mpt",), {"Wqkv": Part.QKV, "out_proj": Part.OUTPUT}, stack="blocks", attention="attn",
        layout=Layout.BLOCKS, position=Position.ALIBI, forms=(SHIPPED,), classes=_causal("Mpt"),
    ),
    _t5("t5", "T5"),
    _t5("mt5", "MT5"),
    _t5("umt5", "UMT5"),
    _bart("bart", "Bart", AutoModelForCausalLM="BartForCausalLM"),
    _bart("whisper", "Whisper", "AutoModelForSpeechSeq2Seq", WHISPER),
    _bart("mbart", "MBart"),
    _bart("pegasus", "Pegasus"),
    _bart("m2m_100", "M2M100"),
    _bart("marian", "Marian", AutoModelForSeq2SeqLM="MarianMTModel"),
    Family(
        "gpt_neo", ("gpt_neo",), OUT_PROJ, stack="h", attention="attn.attention", position=Position.LEARNED,
        forms=(SHIPPED,), heads=("num_heads", "num_attention_heads"), classes=_causal("GPTNeo"),
    ),
    Family(
        "persimmon", ("persimmon",), FUSED | {"q_layernorm": Part.UNTOUCHED, "k_layernorm": Part.KEY_NORM_SHARED},
        layout=Layout.GROUPS, rotary_fraction=0.5, forms=(SHIPPED,), classes=_causal("Persimmon"),
    ),
    # Known, and refused: inspect names them, convert says why.
    Family(
        "diffllama", ("diffllama",),
        SEPARATE | dict.fromkeys(("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "groupnorm"), Part.UNTOUCHED),
        forms=(), refusal="its attention subtracts heads of two halves from each other, so neighbours are no group",
    ),
)  # fmt: skip

REFUSED_TYPES: dict[str, str] = {
    "codegen": NO_COUNT,
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3", "longcat_flash"),
        "latent attention (MLA) already caches one compressed vector for all heads; there are no KV heads to merge",
    ),
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma"),
        "it has no softmax attention, and so no KV cache to shrink",
    ),
}
"""model_type -> why it is refused, for architectures whose layout is not declared here."""
