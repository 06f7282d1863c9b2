"""Makes the tiny random models of this folder and their reference logits.

    pip install torch transformers gguf
    python make_goldens.py [name...]

For each model: NAME.gguf (F32 weights, laid out as llama.cpp's converter lays them out) and
NAME.logits: u32 tokens, u32 vocabulary, i32 ids[tokens], f32 logits[tokens][vocabulary], from
transformers run in float64. The files in the repository were made with torch 2.13, transformers 5.24
and gguf 0.19; other versions of torch may draw other weights, which is as good.
"""
import math
import os
import sys

import gguf
import numpy as np
import torch
from transformers import (Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM,
                          MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3Config, Qwen3ForCausalLM)

HERE = os.path.dirname(os.path.abspath(__file__))
VOCABULARY, TOKENS, CONTEXT = 96, 48, 128

SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
             rms_norm_eps=1e-5, tie_word_embeddings=False)
GEMMA = dict(vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=7,
             num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=12,
             query_pre_attn_scalar=16, max_position_embeddings=CONTEXT, rms_norm_eps=1e-6)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=16,
            beta_fast=4.0, beta_slow=0.5)
LLAMA3 = dict(rope_type="llama3", rope_theta=1000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=64)

# name: (model, architecture in GGUF, config, what else there is)
MODELS = {
    "llama": (LlamaForCausalLM, "llama", LlamaConfig(**SMALL), {}),
    "llama-bias": (LlamaForCausalLM, "llama", LlamaConfig(**SMALL, attention_bias=True), {}),
    "llama-partial": (LlamaForCausalLM, "llama", LlamaConfig(**SMALL), {"rotated": 4}),
    "llama-linear": (LlamaForCausalLM, "llama", LlamaConfig(
        **SMALL, rope_parameters=dict(rope_type="linear", rope_theta=5000.0, factor=4.0)), {}),
    "llama3": (LlamaForCausalLM, "llama", LlamaConfig(
        **SMALL | dict(num_key_value_heads=1, head_dim=16), rope_parameters=LLAMA3), {}),
    "llama-yarn": (LlamaForCausalLM, "llama", LlamaConfig(
        **SMALL | dict(head_dim=16), rope_parameters=YARN), {}),
    "mistral": (MistralForCausalLM, "llama", MistralConfig(
        **SMALL | dict(head_dim=12, tie_word_embeddings=True), sliding_window=16), {}),
    "qwen2": (Qwen2ForCausalLM, "qwen2", Qwen2Config(
        **SMALL | dict(tie_word_embeddings=True)), {}),
    "qwen2-yarn": (Qwen2ForCausalLM, "qwen2", Qwen2Config(
        **SMALL | dict(num_attention_heads=2, num_key_value_heads=2),
        rope_parameters=YARN | dict(attention_factor=1.5)), {}),
    "qwen3": (Qwen3ForCausalLM, "qwen3", Qwen3Config(
        **SMALL | dict(num_attention_heads=3, num_key_value_heads=1), head_dim=16), {}),
    "gemma3": (Gemma3ForCausalLM, "gemma3", Gemma3TextConfig(**GEMMA), {}),
    "gemma3-caps": (Gemma3ForCausalLM, "gemma3", Gemma3TextConfig(
        **GEMMA | dict(num_hidden_layers=4, query_pre_attn_scalar=10), sliding_window_pattern=2,
        final_logit_softcapping=3.0, rope_parameters={
            "full_attention": dict(rope_type="linear", rope_theta=50000.0, factor=8.0),
            "sliding_attention": dict(rope_type="default", rope_theta=10000.0)}),
        {"attention_cap": 2.0}),
}

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}


def gguf_name(name, arch):
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    if part == "post_attention_layernorm":  # gemma3 has it behind, the others call ffn_norm so
        part = "post_attention_norm" if arch == "gemma3" else "ffn_norm"
    elif part == "pre_feedforward_layernorm":
        part = "ffn_norm"
    elif part == "post_feedforward_layernorm":
        part = "post_ffw_norm"
    else:
        part = NAMES[part]
    return f"blk.{layer}.{part}.{kind}"


def randomize(model, arch):
    """Weights of a size that keeps activations, and logits, near one."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight") or "layernorm" in name:
                p.copy_((0 if arch == "gemma3" else 1) + 0.3 * torch.randn_like(p))
            elif name.endswith("bias"):
                p.copy_(0.5 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) / math.sqrt(p.shape[1]))


def pairs(x, heads):
    """Rows of a head from halves (i, i + d/2) to pairs (2i, 2i + 1)."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def write_rope(w, arch, config, more):
    rope = config.rope_parameters
    if arch == "gemma3":
        rope = rope["full_attention"]
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_rope_dimension_count(more.get("rotated", config.head_dim))
    kind = rope["rope_type"]
    if kind == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        w.add_float32(f"{arch}.rope.scaling.yarn_beta_fast", rope["beta_fast"])
        w.add_float32(f"{arch}.rope.scaling.yarn_beta_slow", rope["beta_slow"])
        if rope.get("attention_factor"):
            w.add_float32(f"{arch}.rope.scaling.yarn_attn_factor", rope["attention_factor"])
    elif kind == "llama3":
        w.add_tensor("rope_freqs.weight", llama3_factors(config.head_dim, rope))
    else:
        assert kind == "default", kind


def llama3_factors(dim, rope):
    """What each frequency is divided by."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, out = rope["original_max_position_embeddings"], []
    for i in range(0, dim, 2):
        turns = original * rope["rope_theta"] ** (-i / dim) / (2 * math.pi)
        smooth = (turns - low) / (high - low)
        if turns > high:
            out.append(1.0)
        elif turns < low:
            out.append(rope["factor"])
        else:
            out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    assert 1 < sorted(out)[len(out) // 2] or len(set(out)) > 2, "all three kinds, please"
    return np.array(out, np.float32)


def write(path, model, arch, config, more):
    w = gguf.GGUFWriter(path, arch)
    w.add_name(os.path.basename(path)[:-5])
    w.add_block_count(config.num_hidden_layers)
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_key_length(config.head_dim)
    w.add_value_length(config.head_dim)
    if arch == "gemma3" or "mistral" in path:
        w.add_sliding_window(config.sliding_window)
    if getattr(config, "query_pre_attn_scalar", config.head_dim) != config.head_dim:
        w.add_attention_scale(config.query_pre_attn_scalar ** -0.5)
        w.add_uint32(f"{arch}.attention.sliding_window_pattern", config._sliding_window_pattern)
        w.add_final_logit_softcapping(config.final_logit_softcapping)
        w.add_attn_logit_softcapping(more["attention_cap"])
    write_rope(w, arch, config, more)
    for name, p in model.named_parameters():
        x = p.detach().float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            q = "q_proj" in name
            x = pairs(x, config.num_attention_heads if q else config.num_key_value_heads)
        if arch == "gemma3" and "norm" in name:
            x = x + 1
        w.add_tensor(gguf_name(name, arch), np.ascontiguousarray(x))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def rotate_partly(model, dim, base):
    """The first `dim` elements of a head turn, with the frequencies of a head of that size."""
    freq = model.model.rotary_emb.inv_freq
    freq.zero_()
    freq[: dim // 2] = base ** (-torch.arange(0, dim, 2).double() / dim)


def make(name, seed):
    cls, arch, config, more = MODELS[name]
    config._attn_implementation = "eager"
    if not getattr(config, "head_dim", None):
        config.head_dim = config.hidden_size // config.num_attention_heads
    torch.manual_seed(seed)
    model = cls(config).eval()
    randomize(model, arch)
    if "rotated" in more:
        rotate_partly(model, more["rotated"], config.rope_parameters["rope_theta"])
    path = os.path.join(HERE, name + ".gguf")
    write(path, model, arch, config, more)
    ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    with torch.no_grad():
        caps = {"softcap": more["attention_cap"]} if "attention_cap" in more else {}
        logits = model.double()(ids, **caps).logits[0].numpy()
    with open(path[:-5] + ".logits", "wb") as f:
        f.write(np.array([TOKENS, VOCABULARY], np.uint32).tobytes())
        f.write(ids[0].numpy().astype(np.int32).tobytes() + logits.astype(np.float32).tobytes())
    print(f"{name}: {os.path.getsize(path)} bytes, logits to {abs(logits).max():.2f}, "
          f"std {logits.std():.2f}")


if __name__ == "__main__":
    for number, model_name in enumerate(MODELS):
        if len(sys.argv) == 1 or model_name in sys.argv[1:]:
            make(model_name, number)
