#!/bin/sh
# Compiles every kernel for Hopper (sm_90) and from PTX for Ampere (sm_80), and holds the registers and
# spills that ptxas reports against cuda/kernels/budget.txt: a kernel without a line there, above its
# registers, or with more spills than are allowed there, fails. Exit 77 without nvcc. NVCC, CUDA_JOBS.
set -eu
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || { echo "no nvcc"; exit 77; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
ls cuda/kernels/*.cu | xargs -P "${CUDA_JOBS:-$(nproc)}" -I{} sh -c '
    name=$(basename {} .cu)
    "$0" -std=c++17 -O3 -I. -cubin -arch=sm_90 -Xptxas -v -o "$1/$name.90" {} >"$1/$name.sm_90.log" 2>&1 &&
    "$0" -std=c++17 -O3 -I. -ptx -arch=compute_80 -o "$1/$name.ptx" {} >"$1/$name.sm_80.log" 2>&1 &&
    "$(dirname "$0")/ptxas" -v -arch=sm_80 -o "$1/$name.80" "$1/$name.ptx" >>"$1/$name.sm_80.log" 2>&1 ||
    { cat "$1/$name".sm_*.log; echo "$name: does not compile"; exit 255; }' "$nvcc" "$dir"
cat "$dir"/*.log | awk '
    FNR == NR {
        if ($0 !~ /^#/ && NF >= 2) { budget[$1] = $2; spills[$1] = $3 + 0 }
        next
    }
    /Compiling entry function/ { split($0, q, "\047"); name = q[2]; arch = q[4] }
    /spill stores/ && name != "" {
        for (i = 1; i <= NF; i++) if ($i == "bytes" && $(i + 1) == "spill") spill += $(i - 1)
    }
    /Used [0-9]+ registers/ && name != "" {
        for (i = 1; i <= NF; i++) if ($i == "Used") used = $(i + 1)
        count++
        if (used > most[name]) most[name] = used
        if (spill > spills[name]) {
            printf "%s, %s: %d bytes of spills, %d are allowed\n", name, arch, spill, spills[name]
            bad = 1
        }
        if (!(name in budget)) { printf "%s: %d registers, no line in budget.txt\n", name, used; bad = 1 }
        else if (used > budget[name]) {
            printf "%s, %s: %d registers, %d are allowed\n", name, arch, used, budget[name]; bad = 1
        }
        name = ""; spill = 0
    }
    END {
        for (n in budget) if (!(n in most)) { printf "%s: in budget.txt, but no kernel\n", n; bad = 1 }
        printf "cuda-budget: %d kernels looked at\n", count
        exit bad || !count
    }' cuda/kernels/budget.txt -
