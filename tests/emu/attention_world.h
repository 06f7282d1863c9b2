/*
 * A world for tests of attention: sequences in blocks of KV, queries, a plan, the launches, and
 * what should come out, computed in double precision from what is stored, key by key, by code that
 * shares nothing with the kernels. Whatever a kernel has no business to read is NaN, or forbidden
 * memory.
 */
#ifndef TESTS_EMU_ATTENTION_WORLD_H
#define TESTS_EMU_ATTENTION_WORLD_H

/* The library's headers are C; clang knows C's atomics in C++ too. */
#ifndef __clang__
#define _Atomic
#endif
extern "C" {
#include "cuda/plan.h"
}
#ifndef __clang__
#undef _Atomic
#endif
#include "tests/emu/small.h"

#include <algorithm>

struct shape {
    uint32_t kv_heads = 2, group = 4, dim = 64, value_dim = 0; /* value_dim 0: dim */
    uint32_t block = 16, type = KVP__EL_F16, v_type = 0, out_type = KVP__EL_F32;
    uint32_t window = 0;
    float softcap = 0, scale = 0;                              /* scale 0: 1 / sqrt(dim) */
    bool sinks = false;
    float q_size = 1;                                          /* of the queries' elements */
    uint32_t sms = 8, split = 0;
    uint64_t far = 0;        /* bytes from one block to the next, of which few are there */
    uint32_t out_gap = 0;    /* elements between heads of the output, and before the first */
};

struct sequence {
    uint32_t keys, rows;   /* of `keys` the last `rows` are rows of this step */
    uint32_t shared = 0;   /* of those, so many lie in the first sequence's blocks */
};

/* How far a result may be from the truth: by so much of the sum of |weight * value|, since weights
 * are rounded, and by so much in any case. */
struct bars {
    double rounding = 0, out = 2e-5, lse = 2e-5;
};

static inline bars bars_of(uint32_t type)
{
    bars b;
    if (type == KVP__EL_F32) b.out = 1e-5;
    else b.rounding = type == KVP__EL_BF16 ? 0x1p-8 : 0x1p-11;
    return b;
}

class world {
public:
    shape s;
    kvp__layout layout = {};
    std::vector<sequence> seqs;
    std::vector<std::vector<uint32_t>> tables;
    std::vector<uint32_t> row_seq, positions;
    kvp__cuda_plan plan = {};
    kvp__kv_place kv = {};
    uint32_t heads, rows = 0, stride = 0;
    float scale;
    bool any_kernel = false; /* attention_any instead of what the plan says */
    bool all_parts = false;  /* every result goes through a slot and merge, which tells its LSE */
    double worst = 0, worst_lse = 0;

    world(const shape &given, const std::vector<sequence> &of, uint64_t seed = 1)
        : s(given), seqs(of), heads(given.kv_heads * given.group), r(seed)
    {
        if (s.value_dim == 0) s.value_dim = s.dim;
        if (s.v_type == 0) s.v_type = s.type;
        scale = s.scale != 0 ? s.scale : 1 / sqrtf((float)s.dim);
        make_tables();
        make_store();
        for (uint32_t i = 0; i < seqs.size(); i++)
            for (uint32_t j = 0; j < seqs[i].rows; j++) {
                row_seq.push_back(i);
                positions.push_back(seqs[i].keys - seqs[i].rows + j);
            }
        rows = (uint32_t)positions.size();
        fill_store();
        make_queries();
        make_plan();
    }
    world(const world &) = delete;
    ~world()
    {
        free_all();
        delete q;
        delete sinks;
        assert_int_equal(emu_free(slab), 0);
    }

    uint8_t *key(uint32_t seq, uint32_t t, uint32_t h) { return at(seq, t, h, false); }
    uint8_t *value(uint32_t seq, uint32_t t, uint32_t h) { return at(seq, t, h, true); }

    kvp__cuda_item *items() { return plan.items; }
    uint32_t n_items() const
    {
        uint32_t n = 0;
        for (uint32_t c : plan.n_items) n += c;
        return n;
    }

    /* Everything is launched as the device would, over poisoned memory. */
    void run()
    {
        free_all();
        if (all_parts) send_all_to_slots();
        out = new elements(s.out_type, (size_t)rows * heads * out_head());
        part_out = new device<float>((size_t)(slots_used() + 1) * heads * s.value_dim);
        part_lse = new device<float>((size_t)(slots_used() + 1) * heads);
        lse = new device<float>((size_t)rows * heads);
        upload();
        kvp__attention_args a = args();
        for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++) {
            if (plan.n_items[t] == 0) continue;
            char name[KVP__KERNEL_NAME];
            a.tile = t;
            if (plan.d == 0 || any_kernel)
                launch("attention_any", kvp__launch_attention_any(plan.n_items[t] + surplus,
                                                                  s.kv_heads, s.dim, s.value_dim),
                       &a);
            else
                launch(kvp__cuda_plan_kernel(&plan, t, name),
                       kvp__launch_attention(plan.d, t, plan.n_items[t] + surplus, s.kv_heads), &a);
        }
        kvp__merge_args m = {step->s.p, merges->p, slots->p, part_out->p, part_lse->p,
                             sinks ? sinks->p : nullptr, first_out(), lse->p,
                             (int64_t)heads * out_head(), out_head(), 0, heads, s.value_dim,
                             s.out_type};
        if (plan.n_merges) launch("merge", kvp__launch_merge(plan.n_merges + surplus, heads), &m);
    }

    /* Compares all rows with the definition. */
    void check() { check(bars_of(plan.d == 0 || any_kernel ? KVP__EL_F32 : s.type)); }
    void check(bars b)
    {
        for (uint32_t row = 0; row < rows; row++)
            for (uint32_t h = 0; h < heads; h++) {
                std::vector<double> wanted(s.value_dim), sizes(s.value_dim);
                double log_sum = define(row, h, wanted, sizes);
                for (uint32_t d = 0; d < s.value_dim; d++) {
                    double got = result(row, h, d);
                    double error = fabs(got - wanted[d]);
                    if (s.out_type != KVP__EL_F32) error -= half_unit(s.out_type, wanted[d], 0);
                    if (!(error <= b.out + b.rounding * sizes[d]))
                        fail_msg("row %u (seq %u, position %u) head %u element %u: %g, not %g",
                                 row, row_seq[row], positions[row], h, d, got, wanted[d]);
                    worst = fmax(worst, error);
                }
                if (!is_merged(row)) continue;
                double got = (*lse)[(size_t)row * heads + h], off = fabs(got - log_sum);
                if (!(off <= b.lse) && !(got == log_sum))
                    fail_msg("row %u head %u: LSE %.9g, wanted %.9g", row, h, got, log_sum);
                if (got != log_sum) worst_lse = fmax(worst_lse, off);
            }
    }

    float result(uint32_t row, uint32_t h, uint32_t d)
    {
        return out->get(out_at(row, h) + d);
    }
    void check_gaps()
    {
        for (uint32_t row = 0; row < rows; row++)
            for (uint32_t h = 0; h < heads; h++)
                out->is_untouched(out_at(row, h) - s.out_gap, out_at(row, h));
    }
    std::vector<unsigned char> results() const { return out->bytes.copy(); }

    /* Bytes of K and V that items have to read, each key once an item and KV head. */
    uint64_t ideal_bytes() const
    {
        uint64_t keys = 0;
        for (uint32_t i = 0; i < n_items(); i++)
            keys += plan.items[i].kv_end - plan.items[i].kv_begin;
        return keys * s.kv_heads *
               (s.dim * size_of_el(s.type) + s.value_dim * size_of_el(s.v_type));
    }

    kvp__work_seq work_seq(uint32_t i) const
    {
        kvp__work_seq w = {};
        w.n_rows = seqs[i].rows;
        w.first_pos = seqs[i].keys - seqs[i].rows;
        for (uint32_t j = 0; j < i; j++) w.first_row += seqs[j].rows;
        w.n_blocks = (uint32_t)tables[i].size();
        w.tables[0] = tables[i].data();
        return w;
    }

    elements *q = nullptr;
    device<float> *sinks = nullptr, *part_out = nullptr, *part_lse = nullptr, *lse = nullptr;
    uint32_t surplus = 3; /* items and merges of a launch beyond those that there are */

private:
    random_source r;
    uint8_t *slab = nullptr;
    std::vector<uint8_t> upload_memory, scratch;
    elements *out = nullptr;
    device<kvp__cuda_item> *sent_items = nullptr;
    device<uint32_t> *sent_rows = nullptr, *sent_positions = nullptr, *sent_tables = nullptr,
                     *slots = nullptr;
    device<kvp__cuda_merge> *merges = nullptr;
    one_step *step = nullptr;
    uint32_t more_slots = 0;

    void free_all()
    {
        delete out;
        delete part_out;
        delete part_lse;
        delete lse;
        delete sent_items;
        delete sent_rows;
        delete sent_positions;
        delete sent_tables;
        delete slots;
        delete merges;
        delete step;
        out = nullptr;
        part_out = part_lse = lse = nullptr;
        sent_items = nullptr;
        sent_rows = sent_positions = sent_tables = slots = nullptr;
        merges = nullptr;
        step = nullptr;
    }

    int64_t out_head() const { return s.value_dim + s.out_gap; }
    size_t out_at(uint32_t row, uint32_t h) const
    {
        return ((size_t)row * heads + h) * (size_t)out_head() + s.out_gap;
    }
    void *first_out() { return out->bytes.p + s.out_gap * size_of_el(s.out_type); }

    uint32_t blocks_of(uint32_t keys) const { return (keys + s.block - 1) / s.block; }

    /* Ids in no order; block 0 belongs to nobody. */
    void make_tables()
    {
        uint32_t n = 1;
        for (const sequence &q_ : seqs) n += blocks_of(q_.keys);
        std::vector<uint32_t> ids;
        for (uint32_t i = 1; i < n; i++) ids.push_back(i);
        for (uint32_t i = (uint32_t)ids.size(); i > 1; i--) std::swap(ids[i - 1], ids[r.below(i)]);
        for (uint32_t i = 0; i < seqs.size(); i++) {
            std::vector<uint32_t> t;
            uint32_t common = seqs[i].shared / s.block;
            for (uint32_t b = 0; b < blocks_of(seqs[i].keys); b++)
                if (b < common) {
                    t.push_back(tables[0][b]);
                } else {
                    t.push_back(ids.back());
                    ids.pop_back();
                }
            stride = stride > t.size() ? stride : (uint32_t)t.size();
            tables.push_back(t);
        }
        n_blocks = n;
    }

    void make_store()
    {
        kvp__geometry g = {};
        g.n_layers = g.n_groups = 1;
        g.groups[0] = group();
        kvp_status made =
            kvp__layout_make(&layout, &g, s.block, s.type, s.v_type, n_blocks, nullptr);
        assert_int_equal(made, KVP_OK);
        const kvp__group_layout &l = layout.groups[0];
        kv.pitch = s.far ? s.far : l.pitch;
        uint64_t bytes = kv.pitch * (n_blocks - 1) + l.extent;
        slab = static_cast<uint8_t *>(s.far ? emu_alloc_sparse(bytes) : emu_alloc(bytes));
        assert_non_null(slab);
        kv.slab = slab;
        kv.v_layer = l.k_part;
        kv.k_head = l.k_head;
        kv.v_head = l.v_head;
    }

    kvp_layer_group group() const
    {
        kvp_layer_group g = {};
        g.layers = 1;
        g.kv_heads = s.kv_heads;
        g.query_heads = heads;
        g.key_dim = s.dim;
        g.value_dim = s.value_dim;
        g.window = s.window;
        return g;
    }

    uint8_t *at(uint32_t seq, uint32_t t, uint32_t h, bool v)
    {
        uint32_t dim = v ? s.value_dim : s.dim;
        uint64_t head = v ? kv.v_layer + h * kv.v_head : h * kv.k_head;
        return slab + tables[seq][t / s.block] * kv.pitch + head +
               (size_t)(t % s.block) * dim * size_of_el(v ? s.v_type : s.type);
    }

    /* Keys that some row sees; those before all windows stay NaN. */
    void fill_store()
    {
        for (uint32_t i = 0; i < seqs.size(); i++) {
            uint32_t first = seqs[i].keys - seqs[i].rows;
            uint32_t from = s.window && first >= s.window ? first + 1 - s.window : 0;
            for (uint32_t t = from; t < seqs[i].keys; t++) {
                if (t < seqs[i].shared / s.block * s.block && i > 0 && !s.window) continue;
                for (uint32_t h = 0; h < s.kv_heads; h++) {
                    for (uint32_t d = 0; d < s.dim; d++) put(key(i, t, h), s.type, d, r.normal());
                    for (uint32_t d = 0; d < s.value_dim; d++)
                        put(value(i, t, h), s.v_type, d, r.normal());
                }
            }
        }
    }

    void make_queries()
    {
        q = new elements(s.type, (size_t)rows * heads * s.dim);
        for (size_t i = 0; i < q->n; i++) q->set(i, r.normal() * s.q_size);
        if (!s.sinks) return;
        sinks = new device<float>(heads);
        for (uint32_t h = 0; h < heads; h++) (*sinks)[h] = h % 3 == 2 ? -INFINITY : 2 * r.normal();
    }

    void make_plan()
    {
        uint32_t most = 1;
        for (const sequence &q_ : seqs) most = q_.keys > most ? q_.keys : most;
        kvp_layer_group g = group();
        kvp__cuda_limits l = {rows, (uint32_t)seqs.size(), most, s.sms, s.split};
        assert_int_equal(kvp__cuda_plan_place(&plan, &g, 0, &layout, &l, nullptr), KVP_OK);
        upload_memory.assign(plan.upload_bytes + 64, 0xff);
        scratch.assign(plan.scratch_bytes + 64, 0xff);
        kvp__cuda_plan_use(&plan, aligned(upload_memory), aligned(scratch));
        std::vector<kvp__work_seq> w;
        for (uint32_t i = 0; i < seqs.size(); i++) w.push_back(work_seq(i));
        kvp__work work = {};
        work.n_rows = rows;
        work.n_seqs = (uint32_t)seqs.size();
        work.positions = positions.data();
        work.seqs = w.data();
        kvp__cuda_plan_make(&plan, &work);
        more_slots = 0;
    }

    static void *aligned(std::vector<uint8_t> &v)
    {
        uintptr_t p = reinterpret_cast<uintptr_t>(v.data());
        return reinterpret_cast<void *>((p + 63) & ~(uintptr_t)63);
    }

    uint32_t slots_used() const { return plan.n_slots + more_slots; }

    /* The plan's final items as parts, one for each of their rows. */
    void send_all_to_slots()
    {
        std::vector<kvp__cuda_merge> more;
        all_merges.assign(plan.merges, plan.merges + plan.n_merges);
        all_slots.assign(plan.slots, plan.slots + plan.n_slots);
        for (uint32_t i = 0; i < n_items(); i++) {
            kvp__cuda_item &x = plan.items[i];
            if (x.slot >= 0) continue;
            if (x.first_row) { /* a further tile of the same token */
                x.slot = plan.items[i - 1].slot;
                continue;
            }
            x.slot = (int32_t)slots_used();
            for (uint32_t t = 0; t < x.n_tokens; t++) {
                all_merges.push_back({plan.rows[x.first_token + t], (uint32_t)all_slots.size(), 1});
                all_slots.push_back((uint32_t)x.slot + t);
            }
            more_slots += x.n_tokens;
        }
        plan.n_merges = (uint32_t)all_merges.size();
        merge_list = all_merges.data();
        slot_list = all_slots.data();
        n_slot_list = (uint32_t)all_slots.size();
    }

    template <class T> static device<T> *send(const T *from, size_t n)
    {
        device<T> *d = new device<T>(n + 1); /* never of no bytes; what is behind is NaN */
        if (n) memcpy(static_cast<void *>(d->p), from, n * sizeof(T));
        return d;
    }

    void upload()
    {
        if (!all_parts) {
            merge_list = plan.merges;
            slot_list = plan.slots;
            n_slot_list = plan.n_slots;
        }
        step = new one_step(rows);
        kvp__cuda_plan_counts(&plan, step->s.p);
        sent_items = send(plan.items, n_items());
        sent_rows = send(plan.rows, rows);
        sent_positions = send(positions.data(), rows);
        merges = send(merge_list, plan.n_merges);
        slots = send(slot_list, n_slot_list);
        std::vector<uint32_t> flat((size_t)seqs.size() * stride, 0xffffffffu);
        for (uint32_t i = 0; i < seqs.size(); i++)
            std::copy(tables[i].begin(), tables[i].end(), flat.begin() + (ptrdiff_t)i * stride);
        sent_tables = send(flat.data(), flat.size());
    }

    kvp__attention_args args()
    {
        kvp__attention_args a = {};
        a.step = step->s.p;
        a.items = sent_items->p;
        a.rows = sent_rows->p;
        a.positions = sent_positions->p;
        a.tables = sent_tables->p;
        a.q = q->p();
        a.out = first_out();
        a.part_out = part_out->p;
        a.part_lse = part_lse->p;
        a.sinks = sinks ? sinks->p : nullptr;
        a.kv = kv;
        a.out_row = (int64_t)heads * out_head();
        a.out_head = out_head();
        a.table_stride = stride;
        while ((1u << a.block_shift) < s.block) a.block_shift++;
        a.query_heads = heads;
        a.kv_heads = s.kv_heads;
        a.key_dim = s.dim;
        a.value_dim = s.value_dim;
        a.window = s.window;
        a.k_type = s.type;
        a.v_type = s.v_type;
        a.out_type = s.out_type;
        a.scale = scale;
        a.softcap = s.softcap;
        return a;
    }

    bool is_merged(uint32_t row) const
    {
        for (uint32_t i = 0; i < plan.n_merges; i++)
            if (merge_list[i].row == row) return true;
        return false;
    }

    /* The result of a row and head, the sums of |weight * value|; the logarithm to base 2 of the
     * sum. */
    double define(uint32_t row, uint32_t h, std::vector<double> &wanted,
                  std::vector<double> &sizes)
    {
        uint32_t seq = row_seq[row], p = positions[row], kv_head = h / s.group;
        uint32_t first = s.window && p + 1 > s.window ? p + 1 - s.window : 0;
        double most = sinks ? (*sinks)[h] : -INFINITY, sum = 0;
        std::vector<double> score;
        for (uint32_t t = first; t <= p; t++) {
            const uint8_t *k = key(seq, t, kv_head);
            double dot = 0;
            for (uint32_t d = 0; d < s.dim; d++)
                dot += (double)q->get(((size_t)row * heads + h) * s.dim + d) * ::get(k, s.type, d);
            dot *= scale;
            if (s.softcap != 0) dot = s.softcap * tanh(dot / s.softcap);
            score.push_back(dot);
            most = fmax(most, dot);
        }
        if (most == -INFINITY) return most;
        for (double x : score) sum += exp(x - most);
        if (sinks) sum += exp((*sinks)[h] - most);
        for (uint32_t t = first; t <= p; t++) {
            const uint8_t *v = value(seq, t, kv_head);
            double weight = exp(score[t - first] - most) / sum;
            for (uint32_t d = 0; d < s.value_dim; d++) {
                wanted[d] += weight * ::get(v, s.v_type, d);
                sizes[d] += weight * fabs(::get(v, s.v_type, d));
            }
        }
        return (most + log(sum)) / log(2.0);
    }

    uint32_t n_blocks = 0, n_slot_list = 0;
    std::vector<kvp__cuda_merge> all_merges;
    std::vector<uint32_t> all_slots;
    const kvp__cuda_merge *merge_list = nullptr;
    const uint32_t *slot_list = nullptr;
};

#endif
