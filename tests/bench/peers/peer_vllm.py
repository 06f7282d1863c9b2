"""The peer: vLLM's engine on the CPU, in bf16, or in float32 where that is faster.

usage: peer_vllm.py CHECKPOINT --threads N [--rows N]    (cases on stdin: see workload.py)
The engine runs in this process: its step() then computes one step, so tokens can be timed.
"""
import argparse
import os
import sys

import workload


def settings(threads):
    """vLLM reads its settings from the environment when it is imported."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.update({
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    })


def best_type():
    """bf16 where the processor multiplies it. Elsewhere one row is as fast in either type, 16 rows
    are four times and 512 rows seven times as fast in float32 (torch 2.13, AVX2)."""
    with open("/proc/cpuinfo") as f:
        flags = set(f.read().split())
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


class Engine:
    def __init__(self, model, rows):
        import vllm
        self.engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(
            model=model, dtype=best_type(), max_model_len=8192, max_num_seqs=64,
            max_num_batched_tokens=rows, enable_prefix_caching=True, skip_tokenizer_init=True))
        self.sampling = vllm.SamplingParams(
            temperature=0, max_tokens=8192, ignore_eos=True, detokenize=False)
        self.seen = {}

    def add(self, key, tokens):
        self.seen[key] = 0
        sampling = self.sampling.clone()
        sampling.max_tokens = 8192 - len(tokens)
        self.engine.add_request(str(key), {"prompt_token_ids": tokens}, sampling)

    def step(self):
        given = []
        for output in self.engine.step():
            key, total = int(output.request_id), len(output.outputs[0].token_ids)
            given.append((key, total - self.seen[key]))
            self.seen[key] = total
        return given

    def drop(self, keys):
        self.engine.abort_request([str(key) for key in keys])
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.seen.clear()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rows", type=int, default=512)
    a = parser.parse_args()
    settings(a.threads)
    # Libraries print to stdout while they start; it belongs to the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    engine = Engine(a.model, a.rows)
    sys.stdout = answers
    workload.serve(engine)


if __name__ == "__main__":
    main()
