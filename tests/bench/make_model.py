"""Writes a GGUF file of TinyLlama-1.1B's shape with random weights, to measure speed with.

usage: make_model.py q8_0|q4_0|f16 TOKENIZER_FROM.gguf OUT.gguf    (with the Python package gguf)
The tokenizer, and with it the size of the vocabulary, is that of another file. Tensors are made and
written one by one; the same arguments give the same bytes.
"""
import os
import sys

import gguf
import numpy

LAYERS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS, HEAD_SIZE, CONTEXT = 22, 2048, 5632, 32, 4, 64, 8192
BLOCK = 32  # weights under one scale
Type = gguf.GGMLQuantizationType
TYPES = {"q8_0": (Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
         "q4_0": (Type.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
         "f16": (Type.F16, gguf.LlamaFileType.MOSTLY_F16)}
# Standard deviation of what stands under the scale: all values of its bytes are equally likely.
SPREAD = {"q8_0": 73.3, "q4_0": 4.61}


def matrices(vocabulary):
    """(name, outputs, inputs), in the order of the file."""
    yield "token_embd.weight", vocabulary, WIDTH
    for i in range(LAYERS):
        for name, outputs, inputs in (
                ("attn_q", HEADS * HEAD_SIZE, WIDTH), ("attn_k", KV_HEADS * HEAD_SIZE, WIDTH),
                ("attn_v", KV_HEADS * HEAD_SIZE, WIDTH), ("attn_output", WIDTH, HEADS * HEAD_SIZE),
                ("ffn_gate", FEED_FORWARD, WIDTH), ("ffn_up", FEED_FORWARD, WIDTH),
                ("ffn_down", WIDTH, FEED_FORWARD)):
            yield f"blk.{i}.{name}.weight", outputs, inputs
    yield "output.weight", vocabulary, WIDTH


def norms():
    for i in range(LAYERS):
        yield f"blk.{i}.attn_norm.weight"
        yield f"blk.{i}.ffn_norm.weight"
    yield "output_norm.weight"


def random_matrix(kind, outputs, inputs, random):
    """Deviation 1 / sqrt(inputs), so that activations keep their size from layer to layer."""
    deviation = 1 / inputs ** 0.5
    if kind == "f16":
        values = random.standard_normal((outputs, inputs), dtype=numpy.float32)
        return (values * deviation).astype(numpy.float16)
    blocks, payload = outputs * inputs // BLOCK, BLOCK if kind == "q8_0" else BLOCK // 2
    out = numpy.empty((blocks, 2 + payload), numpy.uint8)
    scale = numpy.array([deviation / SPREAD[kind]], numpy.float16)
    out[:, :2] = scale.view(numpy.uint8)
    out[:, 2:] = random.integers(0, 256, (blocks, payload), dtype=numpy.uint8)
    return out.reshape(outputs, -1)


def copy_tokenizer(source, writer):
    fields = gguf.GGUFReader(source).fields
    for name, field in fields.items():
        if not name.startswith("tokenizer."):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    return len(fields["tokenizer.ggml.tokens"].data)


def main():
    kind, source, target = sys.argv[1:]
    random = numpy.random.default_rng(1)
    unfinished = target + ".part"
    writer = gguf.GGUFWriter(unfinished, "llama")
    vocabulary = copy_tokenizer(source, writer)
    writer.add_name(f"Random 1.1B {kind}")
    writer.add_file_type(TYPES[kind][1])
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)

    ggml_type = TYPES[kind][0]
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    for name, outputs, inputs in matrices(vocabulary):
        row = inputs // per_block * block_bytes
        if kind == "f16":
            writer.add_tensor_info(name, (outputs, inputs), numpy.dtype(numpy.float16),
                                   outputs * row)
        else:
            writer.add_tensor_info(name, (outputs, row), numpy.dtype(numpy.uint8), outputs * row,
                                   raw_dtype=ggml_type)
    one = numpy.ones(WIDTH, numpy.float32)
    for name in norms():
        writer.add_tensor_info(name, one.shape, one.dtype, one.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, outputs, inputs in matrices(vocabulary):
        writer.write_tensor_data(random_matrix(kind, outputs, inputs, random))
    for _ in norms():
        writer.write_tensor_data(one)
    writer.close()
    os.replace(unfinished, target)


if __name__ == "__main__":
    main()
