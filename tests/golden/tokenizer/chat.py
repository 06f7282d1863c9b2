#!/usr/bin/env python3
"""What transformers makes of conversations: chat.py SMOLLM2.gguf GEMMA3.gguf > chat.txt

Lines: "T vocabulary format template" begins a template; "M role text" adds a message, "A flags ids"
ends the conversation (flag 1: with the start of the reply). Texts are escaped as in strings.txt. The
template of SmolLM2 is the file's own; the others have the turns of the models they are named after,
without tools and the checks of roles.
"""
import os
import sys

import gguf
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ask import published
from merge import escaped

CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
          " + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
CHATML_DEFAULT = ("{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
                  "{%- else %}{{- '<|im_start|>system\\nYou are a test.\\nBe \\\\ brief.<|im_end|>\\n' }}{%- endif %}"
                  "{%- for m in messages %}{%- if m.role != 'system' or not loop.first %}{{- '<|im_start|>' + m.role + '\\n' + m.content"
                  " + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")
GEMMA = ("{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set first = messages[0]['content'] + '\\n\\n' -%}"
         "{%- set rest = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}"
         "{%- for m in rest -%}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n'"
         " + (first if loop.first else '') }}{{ m['content'] | trim }}{{ '<end_of_turn>\\n' }}{%- endfor -%}"
         "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}")
LLAMA3 = ("{% for m in messages %}{% set t = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim"
          " + '<|eot_id|>' %}{% if loop.first %}{% set t = bos_token + t %}{% endif %}{{ t }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}")
LLAMA31 = ("{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set s = messages[0]['content'] | trim %}{%- set rest = messages[1:] %}"
           "{%- else %}{%- set s = '' %}{%- set rest = messages %}{%- endif %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
           "{{- 'Cutting Knowledge Date: December 2023\\n' }}{{- 'Today Date: 26 Jul 2024\\n\\n' }}{{- s }}{{- '<|eot_id|>' }}"
           "{%- for m in rest %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
           "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}")
MISTRAL_HEAD = ("{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set rest = messages[1:] %}"
                "{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}{%- for message in rest %}{%- if message['role'] == 'user' %}")
MISTRAL1 = (MISTRAL_HEAD + "{%- if loop.first and system_message is defined %}{{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}"
            "{%- else %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}{%- else %}{{- ' ' + message['content'] + eos_token}}"
            "{%- endif %}{%- endfor %}")
MISTRAL0 = ("{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
            "{% else %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}")
MISTRAL3 = (MISTRAL_HEAD + "{%- if loop.last and system_message is defined %}{{- \"[INST] \" + system_message + \"\\n\\n\" + message[\"content\"] + \"[/INST]\" }}"
            "{%- else %}{{- \"[INST] \" + message[\"content\"] + \"[/INST]\" }}{%- endif %}{%- else %}{{- \" \" + message[\"content\"]|trim + eos_token}}"
            "{%- endif %}{%- endfor %}")
TEKKEN = MISTRAL3.replace("[INST] ", "[INST]").replace('" " + message["content"]|trim', 'message["content"]|trim')
MISTRAL7 = ("{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + '[/INST]' }}"
            "{%- elif message['role'] == 'system' %}{{- '[SYSTEM_PROMPT] ' + message['content'] + '[/SYSTEM_PROMPT]' }}"
            "{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}")

U, A, S = "user", "assistant", "system"
CONVERSATIONS = [
    [(U, "Hi")],
    [(U, "  What is 2+2?\n"), (A, " 4 \n"), (U, "Why?\n\n1. \u00e9\u4f60\U0001f600")],
    [(S, "Be brief."), (U, "Hi")],
    [(S, " Be\nbrief. "), (U, "\tHi\u00a0\u2003"), (A, "Yes.\x1c"), (U, ""), (A, "No"), (U, "3")],
    [(U, "x"), (A, "y")],
]


def smollm2(path):
    return published(path), str(gguf.GGUFReader(path).fields["tokenizer.chat_template"].contents())


def show(vocabulary, number, fast, bos, eos, template):
    tok = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token=bos, eos_token=eos)
    print("T", vocabulary, number, escaped(template.encode("utf-8")))
    for conversation in CONVERSATIONS:
        if template is MISTRAL0 and conversation[0][0] == S:
            continue  # it has no place for it
        for flags in (0, 1):
            for role, text in conversation:
                print(f"M {role} {escaped(text.encode('utf-8'))}")
            ids = tok.apply_chat_template([{"role": r, "content": t} for r, t in conversation], chat_template=template,
                                          add_generation_prompt=bool(flags), tokenize=True, return_dict=False)
            print("A", flags, *ids)


def main():
    tiny = published("tiny-bpe.gguf")
    bos, eos = "<|begin_of_text|>", "<|im_end|>"
    show("smollm2", 2, *smollm2(sys.argv[1])[:1], "<|im_start|>", "<|im_end|>", smollm2(sys.argv[1])[1])
    show("tiny-bpe", 2, tiny, bos, eos, CHATML)
    show("tiny-bpe", 2, tiny, bos, eos, CHATML_DEFAULT)
    show("tiny-bpe", 3, tiny, bos, eos, GEMMA)
    show("tiny-bpe", 4, tiny, bos, eos, LLAMA3)
    show("tiny-bpe", 4, tiny, bos, eos, LLAMA31)
    for template in (MISTRAL0, MISTRAL1, MISTRAL3, TEKKEN, MISTRAL7):
        show("tiny-bpe", 5, tiny, bos, eos, template)
    gemma = AutoTokenizer.from_pretrained(os.path.dirname(sys.argv[2]), gguf_file=os.path.basename(sys.argv[2]))
    show("gemma3", 3, gemma.backend_tokenizer, "<bos>", "<eos>", GEMMA)


if __name__ == "__main__":
    main()
