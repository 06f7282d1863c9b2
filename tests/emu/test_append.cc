/*
 * append against a definition in double precision, for every combination of what may be absent;
 * where K and V go in the pool, and that nothing else there is written.
 */
#include "tests/emu/small.h"

enum { NONE = 0, PAIRS = 1, HALVES = 2 };

struct shape {
    uint32_t query_heads, kv_heads, key_dim, value_dim;
    uint32_t rope_kind, rope_dim;
    uint32_t in_type, k_type, v_type;
    bool bias, norm;
    uint32_t block_shift;
    bool strided; /* heads and rows of the input lie apart */
    float size;
};

/* What a head becomes, in double: bias, norm, rotation. */
static std::vector<double> finished(const std::vector<double> &x, const float *bias,
                                    const float *norm, double eps, uint32_t kind, uint32_t rope_dim,
                                    const double *inv_freq, double magnitude, uint32_t position)
{
    std::vector<double> v = x;
    double squares = 0;
    for (size_t i = 0; i < v.size(); i++) {
        if (bias) v[i] += bias[i];
        squares += v[i] * v[i];
    }
    double factor = 1 / sqrt(squares / (double)v.size() + eps);
    if (norm)
        for (size_t i = 0; i < v.size(); i++) v[i] *= factor * norm[i];
    uint32_t half = kind == NONE ? 0 : rope_dim / 2;
    for (uint32_t i = 0; i < half; i++) {
        uint32_t p = kind == PAIRS ? 2 * i : i, q = kind == PAIRS ? 2 * i + 1 : i + half;
        double angle = position * inv_freq[i], c = cos(angle) * magnitude,
               s = sin(angle) * magnitude;
        double a = v[p], b = v[q];
        v[p] = a * c - b * s;
        v[q] = b * c + a * s;
    }
    return v;
}

struct world {
    static const uint32_t ROWS = 5, GRID = 7, SEQS = 3, STRIDE = 6, BLOCKS = 9;
    shape s;
    random_source r;
    std::vector<double> inv_freq;
    elements q, k, v;
    device<float> q_bias, k_bias, v_bias, q_norm, k_norm;
    device<double> freq;
    device<uint32_t> positions, row_seq, tables;
    elements q_out;
    uint64_t k_head, v_head, layer, pitch, base;
    device<unsigned char> slab;
    kvp__append_args a;

    static std::vector<double> frequencies(const shape &s)
    {
        std::vector<double> f(s.rope_dim / 2 + 1);
        for (size_t i = 0; i < f.size(); i++)
            f[i] = pow(10000.0, -2.0 * (double)i / (s.rope_dim + 1));
        return f;
    }
    uint32_t heads_apart(uint32_t dim) const { return dim + (s.strided ? 3 : 0); }
    size_t row_of(uint32_t heads, uint32_t dim) const
    {
        return (size_t)heads * heads_apart(dim) + (s.strided ? 5 : 0);
    }
    size_t needed(uint32_t heads, uint32_t dim) const
    {
        if (heads == 0 || dim == 0) return 1;
        return (ROWS - 1) * row_of(heads, dim) + (heads - 1) * heads_apart(dim) + dim;
    }

    explicit world(const shape &of)
        : s(of), r(of.key_dim * 131 + of.query_heads), inv_freq(frequencies(of)),
          q(s.in_type, needed(s.query_heads, s.key_dim)),
          k(s.in_type, needed(s.kv_heads, s.key_dim)),
          v(s.in_type, needed(s.kv_heads, s.value_dim)),
          q_bias((size_t)s.query_heads * s.key_dim + 1), k_bias((size_t)s.kv_heads * s.key_dim),
          v_bias((size_t)s.kv_heads * s.value_dim + 1), q_norm(s.key_dim), k_norm(s.key_dim),
          freq(inv_freq), positions(GRID), row_seq(GRID), tables((size_t)SEQS * STRIDE),
          q_out(s.k_type, (size_t)GRID * s.query_heads * s.key_dim + 1),
          k_head((((uint64_t)s.key_dim << s.block_shift) * size_of_el(s.k_type) + 63) / 64 * 64),
          v_head((((uint64_t)s.value_dim << s.block_shift) * size_of_el(s.v_type) + 63) / 64 * 64),
          layer(s.kv_heads * (k_head + v_head)), pitch(3 * layer + 192), base(256),
          slab(base + BLOCKS * pitch)
    {
        for (elements *e : {&q, &k, &v})
            for (size_t i = 0; i < e->n; i++) e->set(i, r.normal() * s.size);
        for (device<float> *f : {&q_bias, &k_bias, &v_bias, &q_norm, &k_norm})
            for (size_t i = 0; i < f->n; i++) (*f)[i] = r.normal();
        uint32_t most = STRIDE << s.block_shift;
        for (uint32_t i = 0; i < ROWS; i++) {
            row_seq[i] = i % SEQS;
            positions[i] = i < SEQS ? r.below(most) : (positions[i - SEQS] + 1) % most;
        }
        for (size_t i = 0; i < tables.n; i++) tables[i] = (uint32_t)(i * 5) % BLOCKS;
    }

    /* Two sequences may share a block here: never the same token of it. */
    bool collides() const
    {
        for (uint32_t i = 0; i < ROWS; i++)
            for (uint32_t j = 0; j < i; j++)
                if (place_of(i, s.key_dim, s.k_type, 0) == place_of(j, s.key_dim, s.k_type, 0))
                    return true;
        return false;
    }
    uint64_t place_of(uint32_t row, uint32_t dim, uint32_t type, uint64_t part) const
    {
        uint32_t position = positions.p[row];
        uint32_t block = tables.p[row_seq.p[row] * STRIDE + (position >> s.block_shift)];
        uint32_t token = position & ((1u << s.block_shift) - 1);
        return base + block * pitch + part + (uint64_t)token * dim * size_of_el(type);
    }

    void run(one_step &step)
    {
        memset(static_cast<void *>(&a), 0, sizeof a);
        a.step = step;
        a.q = q.p();
        a.k = k.p();
        a.v = v.p();
        a.q_row = (int64_t)row_of(s.query_heads, s.key_dim);
        a.k_row = (int64_t)row_of(s.kv_heads, s.key_dim);
        a.v_row = (int64_t)row_of(s.kv_heads, s.value_dim);
        a.q_head = a.k_head = heads_apart(s.key_dim);
        a.v_head = heads_apart(s.value_dim);
        a.q_bias = s.bias ? q_bias.p : nullptr;
        a.k_bias = s.bias ? k_bias.p : nullptr;
        a.v_bias = s.bias ? v_bias.p : nullptr;
        a.q_norm = s.norm ? q_norm.p : nullptr;
        a.k_norm = s.norm ? k_norm.p : nullptr;
        a.inv_freq = s.rope_kind == NONE ? nullptr : freq.p;
        a.positions = positions.p;
        a.row_seq = row_seq.p;
        a.tables = tables.p;
        a.q_out = q_out.p();
        a.kv.slab = slab.p;
        a.kv.base = base;
        a.kv.pitch = pitch;
        a.kv.k_layer = layer;
        a.kv.v_layer = layer + s.kv_heads * k_head;
        a.kv.k_head = k_head;
        a.kv.v_head = v_head;
        a.table_stride = STRIDE;
        a.block_shift = s.block_shift;
        a.in_type = s.in_type;
        a.k_type = s.k_type;
        a.v_type = s.v_type;
        a.query_heads = s.query_heads;
        a.kv_heads = s.kv_heads;
        a.key_dim = s.key_dim;
        a.value_dim = s.value_dim;
        a.rope_kind = s.rope_kind;
        a.rope_dim = s.rope_kind == NONE ? 0 : s.rope_dim;
        a.rope_magnitude = 1.25f;
        a.eps = 1e-5f;
        launch("append", kvp__launch_append(GRID, &a), &a);
    }

    /* One head at `got`, elements of `type`. */
    void check_head(const void *got, uint32_t type, const elements &in, size_t at, uint32_t dim,
                    const float *bias, const float *norm, uint32_t kind, uint32_t row) const
    {
        std::vector<double> x(dim);
        for (uint32_t i = 0; i < dim; i++) x[i] = in.get(at + i);
        x = finished(x, bias, norm, 1e-5, kind, s.rope_dim, &inv_freq[0], 1.25, positions.p[row]);
        double greatest = 0;
        for (double e : x) greatest = fmax(greatest, fabs(e));
        for (uint32_t i = 0; i < dim; i++) {
            double wanted = x[i];
            if (type == KVP__EL_F16) wanted = fmax(-65504, fmin(65504, wanted));
            assert_near(get(got, type, i), wanted, half_unit(type, wanted, 0) + 2e-6 * greatest);
        }
    }

    void check(uint32_t rows)
    {
        std::vector<bool> written(slab.n);
        for (uint32_t row = 0; row < rows; row++) {
            for (uint32_t h = 0; h < s.query_heads; h++) {
                size_t to = ((size_t)row * s.query_heads + h) * s.key_dim;
                check_head(q_out.bytes.p + to * size_of_el(s.k_type), s.k_type, q,
                           row * row_of(s.query_heads, s.key_dim) + h * heads_apart(s.key_dim),
                           s.key_dim, s.bias ? q_bias.p + h * s.key_dim : nullptr,
                           s.norm ? q_norm.p : nullptr, s.rope_kind, row);
            }
            for (uint32_t h = 0; h < s.kv_heads; h++) {
                uint64_t to = place_of(row, s.key_dim, s.k_type, layer + h * k_head);
                check_head(slab.p + to, s.k_type, k,
                           row * row_of(s.kv_heads, s.key_dim) + h * heads_apart(s.key_dim),
                           s.key_dim, s.bias ? k_bias.p + h * s.key_dim : nullptr,
                           s.norm ? k_norm.p : nullptr, s.rope_kind, row);
                for (size_t i = 0; i < s.key_dim * size_of_el(s.k_type); i++)
                    written[to + i] = true;
                to = place_of(row, s.value_dim, s.v_type, layer + s.kv_heads * k_head + h * v_head);
                check_head(slab.p + to, s.v_type, v,
                           row * row_of(s.kv_heads, s.value_dim) + h * heads_apart(s.value_dim),
                           s.value_dim, s.bias ? v_bias.p + h * s.value_dim : nullptr, nullptr,
                           NONE, row);
                for (size_t i = 0; i < s.value_dim * size_of_el(s.v_type); i++)
                    written[to + i] = true;
            }
        }
        for (size_t i = 0; i < slab.n; i++)
            if (!written[i]) assert_int_equal(slab[i], 0xff);
        q_out.is_untouched((size_t)rows * s.query_heads * s.key_dim, q_out.n);
    }
};

static void check_shape(const shape &s)
{
    world w(s);
    while (w.collides())
        for (uint32_t i = 0; i < world::ROWS; i++)
            w.positions[i] = w.r.below(world::STRIDE << s.block_shift);
    one_step step(world::ROWS);
    w.run(step);
    w.check(world::ROWS);
    /* A smaller step in the same grid. */
    w.slab.poison();
    w.q_out.bytes.poison();
    step->n_rows = 2;
    w.run(step);
    w.check(2);
}

static void every_combination_of_what_may_be_absent(void **)
{
    for (uint32_t in : {KVP__EL_F32, KVP__EL_F16, KVP__EL_BF16})
        for (uint32_t kind : {NONE, PAIRS, HALVES})
            for (uint32_t bits = 0; bits < 8; bits++) {
                uint32_t k = bits & 4 ? KVP__EL_BF16 : KVP__EL_F16;
                uint32_t v = in == KVP__EL_BF16 ? KVP__EL_BF16 : KVP__EL_F16;
                check_shape({5, 2, 64, 64, kind, 64, in, k, v, (bits & 1) != 0, (bits & 2) != 0, 4,
                             (bits & 1) == 0, 1.0f});
            }
}

static void every_head_size(void **)
{
    const struct { uint32_t key, value, rope; } dims[] = {
        {1, 1, 0},    {2, 2, 2},     {3, 5, 2},     {6, 4, 6},     {7, 7, 4},      {16, 16, 16},
        {64, 64, 32}, {80, 80, 80},  {96, 96, 96},  {112, 112, 56}, {128, 128, 128}, {129, 131, 64},
        {192, 128, 64}, {256, 256, 256}, {256, 64, 128}};
    for (const auto &d : dims)
        for (uint32_t kind : {PAIRS, HALVES})
            for (uint32_t type : {KVP__EL_F32, KVP__EL_F16})
                for (uint32_t shift : {0u, 4u})
                    check_shape({3, 1, d.key, d.value, kind, d.rope, KVP__EL_F32, type, type, true,
                                 true, shift, false, 1.0f});
}

static void any_number_of_heads(void **)
{
    const struct { uint32_t q, kv; } heads[] = {{0, 1}, {1, 1}, {6, 1}, {8, 8}, {12, 4}, {32, 8}};
    for (const auto &h : heads)
        check_shape({h.q, h.kv, 32, 32, HALVES, 32, KVP__EL_F32, KVP__EL_F16, KVP__EL_BF16, true,
                     true, 3, true, 1.0f});
    /* No values at all. */
    check_shape({4, 2, 32, 0, HALVES, 16, KVP__EL_F32, KVP__EL_F16, KVP__EL_F16, false, true, 3,
                 false, 1.0f});
}

static void what_a_half_cannot_hold(void **)
{
    check_shape({3, 2, 64, 64, HALVES, 64, KVP__EL_F32, KVP__EL_F16, KVP__EL_F16, false, false, 4,
                 false, 60000.0f});
    check_shape({3, 2, 64, 64, HALVES, 64, KVP__EL_F32, KVP__EL_BF16, KVP__EL_F16, false, false, 4,
                 false, 60000.0f});
}

static void under_every_schedule(void **)
{
    under_schedules([] {
        check_shape({7, 2, 66, 60, PAIRS, 40, KVP__EL_F16, KVP__EL_F16, KVP__EL_BF16, true, true, 2,
                     true, 1.0f});
    });
}

/* Pairs (1, 0) become cosine and sine; the definition is double's, of the product in double. */
static void sines_and_cosines_of_far_positions(void **)
{
    const uint32_t dim = 128, rows = 40;
    random_source r(3);
    device<float> q((size_t)rows * dim), q_out((size_t)rows * dim);
    device<double> freq(dim / 2);
    device<uint32_t> positions(rows), row_seq(rows), tables(1);
    for (size_t i = 0; i < q.n; i++) q[i] = i % 2 ? 0.0f : 1.0f;
    for (uint32_t i = 0; i < dim / 2; i++) freq[i] = pow(500000.0, -2.0 * i / dim);
    for (uint32_t i = 0; i < rows; i++) positions[i] = i < 20 ? i : r.below(1u << 22);
    positions[rows - 1] = (1u << 22) - 1;
    one_step step(rows);
    kvp__append_args a = {};
    a.step = step;
    a.q = q.p;
    a.q_row = a.q_head = dim;
    a.inv_freq = freq.p;
    a.positions = positions.p;
    a.row_seq = row_seq.p;
    a.tables = tables.p;
    a.q_out = q_out.p;
    a.in_type = a.k_type = a.v_type = KVP__EL_F32;
    a.query_heads = 1;
    a.key_dim = a.rope_dim = dim;
    a.rope_kind = PAIRS;
    a.rope_magnitude = 1;
    launch("append", kvp__launch_append(rows, &a), &a);
    double worst = 0;
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t i = 0; i < dim / 2; i++) {
            double angle = positions[row] * freq[i];
            worst = fmax(worst, fabs(q_out[row * dim + 2 * i] - cos(angle)));
            worst = fmax(worst, fabs(q_out[row * dim + 2 * i + 1] - sin(angle)));
        }
    assert_true(worst < 1.5e-7);
}

/* Block numbers times pitch beyond 32 bits, and a block table whose entries lie far apart. */
static void blocks_far_away(void **)
{
    const uint64_t pitch = 3u << 20, blocks = 7000; /* 20 GB */
    unsigned char *slab = static_cast<unsigned char *>(emu_alloc_sparse(pitch * blocks));
    assert_non_null(slab);
    random_source r(9);
    device<float> k(32), v(32);
    for (int i = 0; i < 32; i++) k[i] = v[i] = r.normal();
    device<uint32_t> positions(std::vector<uint32_t>{37}), row_seq(std::vector<uint32_t>{1});
    device<uint32_t> tables(8);
    tables[4 + 2] = (uint32_t)blocks - 1;
    one_step step(1);
    kvp__append_args a = {};
    a.step = step;
    a.k = k.p;
    a.v = v.p;
    a.k_row = a.v_row = a.k_head = a.v_head = 32;
    a.positions = positions.p;
    a.row_seq = row_seq.p;
    a.tables = tables.p;
    a.kv.slab = slab;
    a.kv.pitch = pitch;
    a.kv.k_layer = 1u << 20;
    a.kv.v_layer = 2u << 20;
    a.kv.k_head = a.kv.v_head = 4096;
    a.table_stride = 4;
    a.block_shift = 4;
    a.in_type = a.k_type = a.v_type = KVP__EL_F32;
    a.kv_heads = 1;
    a.key_dim = a.value_dim = 32;
    launch("append", kvp__launch_append(1, &a), &a);
    const unsigned char *block = slab + (blocks - 1) * pitch;
    assert_memory_equal(block + (1u << 20) + 5 * 128, k.p, 128);
    assert_memory_equal(block + (2u << 20) + 5 * 128, v.p, 128);
    assert_int_equal(emu_free(slab), 0);
}

int main()
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(every_combination_of_what_may_be_absent),
        cmocka_unit_test(every_head_size),
        cmocka_unit_test(any_number_of_heads),
        cmocka_unit_test(what_a_half_cannot_hold),
        cmocka_unit_test(under_every_schedule),
        cmocka_unit_test(sines_and_cosines_of_far_positions),
        cmocka_unit_test(blocks_far_away),
    };
    return cmocka_run_group_tests_name("append", tests, nullptr, nullptr);
}
