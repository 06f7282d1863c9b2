#!/bin/sh
# Makes everything in this folder but the scripts. Needs two Pythons (the packages want different
# numpy versions): one with llama-cpp-python, one with transformers, torch, gguf and sentencepiece.
# usage: make.sh LLAMA_PYTHON TRANSFORMERS_PYTHON SMOLLM2.gguf GEMMA3.gguf TEXTS.json
set -eu
llama=$1 other=$2 smollm2=$3 gemma3=$4 texts=$5
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pres="gpt-2 llama-bpe qwen2 tekken deepseek-v3 default"
$other tiny.py "$work" $pres
cp "$work/tiny-bpe.gguf" "$work/tiny-spm.gguf" .
$other merge.py "$texts" >strings.txt

# both NAME FILE KIND [BASE]
both() {
    $llama ask.py llama "$2" "$texts" >"$work/llama.json" 2>/dev/null
    if [ "$3" != none ]; then
        $other ask.py "$3" "$2" "$texts" >"$work/other.json" 2>/dev/null
        $other merge.py "$1" "$work/llama.json" "$work/other.json" ${4:-} >"$1.ids"
    else
        $other merge.py "$1" "$work/llama.json" ${4:-} >"$1.ids"
    fi
}

both tiny-bpe "$work/tiny-bpe.gguf" published
for pre in $pres; do
    kind=published
    [ $pre = default ] && kind=none # llama.cpp's own
    both tiny-bpe-$pre "$work/tiny-bpe-$pre.gguf" $kind tiny-bpe.ids
done
both tiny-spm "$work/tiny-spm.gguf" transformers
both smollm2 "$smollm2" published
both gemma3 "$gemma3" transformers
$other chat.py "$smollm2" "$gemma3" >chat.txt
