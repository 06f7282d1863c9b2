"""The peer: OpenVINO GenAI's continuous batching, which reads the GGUF file itself.

usage: peer_openvino.py MODEL.gguf --threads N --case CASE    (cases on stdin: see workload.py)
The cache is made as large as CASE needs. It keeps keys and values in 8 bits, this peer's default.
"""
import argparse

import numpy
import openvino
import openvino_genai

import workload

BLOCK_TOKENS = 32  # of this peer's cache on the CPU


class Engine:
    def __init__(self, model, threads, case):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = workload.CACHE_TOKENS[case] * 5 // 4 // BLOCK_TOKENS + 64
        scheduler.enable_prefix_caching = True
        # Rows of a step. Half as many beside sequences that decode, so that they wait less.
        scheduler.max_num_batched_tokens = 256 + workload.MIXED_SEQS if "mixed" in case else 512
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}, {})
        self.config = openvino_genai.GenerationConfig()
        self.config.max_new_tokens = 4096
        self.config.ignore_eos = True
        self.config.do_sample = False
        self.handles = {}

    def add(self, key, tokens):
        ids = openvino.Tensor(numpy.array([tokens], dtype=numpy.int64))
        self.handles[key] = self.pipeline.add_request(key, ids, self.config)

    def step(self):
        self.pipeline.step()
        given = []
        for key, handle in self.handles.items():
            while handle.can_read():
                given.append((key, sum(len(o.generated_ids) for o in handle.read().values())))
        return given

    def drop(self, keys):
        for key in keys:
            self.handles.pop(key).cancel()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--case", required=True)
    a = parser.parse_args()
    workload.serve(Engine(a.model, a.threads, a.case))


if __name__ == "__main__":
    main()
