/* Digests of products and decode steps on random input, by which a library shows that it computes the exact kind.
 *
 * No input comes from a library, so that the same digests are computed on every processor; docs/exact.md has them.
 */
#define COUNT(array) (int)(sizeof(array) / sizeof *(array))
#define EDGE 1024 /* bytes behind each array, which are fetched and not used */

static uint64_t state, digest;
static void *drawn_memory[1024];
static int drawn_arrays;

/* `count` bytes of zeros, until `forget`. */
static void *memory(int64_t count) { return drawn_memory[drawn_arrays++] = calloc(1, count + EDGE); }

/* All arrays but the first `kept`. */
static void forget(int kept) {
    while (drawn_arrays > kept) free(drawn_memory[--drawn_arrays]);
}

static uint64_t drawn(void) { /* xorshift64* (Vigna 2016) */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 0x2545f4914f6cdd1dull;
}

static int64_t below(int64_t bound) { return (int64_t)((drawn() >> 33) % (uint64_t)bound); }

/* Mostly of a usual size; `wild`: some are subnormal, tiny, huge or zero as well. */
static float value(int wild) {
    uint32_t bits = (uint32_t)drawn() & 0x807fffffu, kind = wild ? (uint32_t)below(32) : 31;
    uint32_t exponent = kind > 6 ? 118 + (uint32_t)below(9) : kind > 4 ? (uint32_t)below(255) : kind > 2 ? 1 : 0;
    return kind ? bits_float(bits | exponent << 23) : 0.0f;
}

static float *floats(int64_t count, int wild) {
    float *made = memory(count * sizeof(float));
    for (int64_t index = 0; index < count; index++) made[index] = value(wild);
    return made;
}

/* The first ones are drawn: as many as the digests of docs/exact.md follow from. */
static float *partly(int64_t count, int64_t first) {
    float *made = memory(count * sizeof(float));
    for (int64_t index = 0; index < first; index++) made[index] = value(0);
    return made;
}

static void *bytes(int64_t count) {
    uint8_t *made = memory(count);
    for (int64_t index = 0; index < count; index++) made[index] = (uint8_t)(drawn() >> 56);
    return made;
}

/* Finite ones, up to 4 or of a usual size. */
static void some_halves(uint16_t *into, int64_t count, int wild) {
    for (int64_t index = 0; index < count; index++)
        into[index] = (uint16_t)((drawn() & 0x83ffu) | (uint64_t)(wild ? below(17) : 7 + below(3)) << 10);
}

#ifndef ALSO
#define ALSO(values, count) /* of what was computed, for tests/parity/digests.c */
#endif

static void look_at(const float *values, int64_t count) {
    ALSO(values, count);
    for (int64_t index = 0; index < count; index++) { /* a NaN's bits are the processor's affair */
        const uint32_t bits = values[index] != values[index] ? 0x7fc00000u : float_bits(values[index]);
        for (int byte = 0; byte < 4; byte++) digest = (digest ^ (bits >> 8 * byte & 255u)) * 0x100000001b3ull; /* FNV-1a */
    }
}

static struct matrix matrix(int form, int64_t out, int64_t in, int wild, int with_bias) {
    static const int blocks[] = {[FORM_Q4] = 32, [FORM_Q4_HALF] = 32, [FORM_NF4] = 64, [FORM_Q4_K] = 32, [FORM_Q3_K] = 16,
                                 [FORM_Q8_HALF] = 32, [FORM_Q6] = 32, [FORM_Q6_HALF] = 32, [FORM_Q5_K] = 32, [FORM_Q6_K] = 16,
                                 [FORM_IQ4_NL] = 32, [FORM_IQ4_XS] = 32, [FORM_MXFP4] = 32, [FORM_Q2_K] = 16};
    const int64_t tiles = (out + LANES - 1) / LANES;
    struct matrix m = {.form = form, .out = (int32_t)out, .in = (int32_t)in};
    m.bias = with_bias ? floats(tiles * LANES, wild) : NULL;
    m.block = form == FORM_Q8_PLAIN ? (int32_t)in : form == FORM_F32_COLUMNS ? (int32_t)(tiles * LANES) : blocks[form];
    if (form == FORM_F32) m.codes = floats(out * in, wild);
    else if (form == FORM_F32_COLUMNS) m.codes = floats(m.block * in, wild);
    else if (form == FORM_F16 || form == FORM_BF16) {
        uint16_t *codes = bytes(2 * out * in);
        if (form == FORM_F16) some_halves(codes, out * in, wild);
        else for (int64_t index = 0; index < out * in; index++) codes[index] = (uint16_t)(float_bits(value(wild)) >> 16);
        m.codes = codes;
    } else {
        const int64_t count = in / m.block, scales = tile_scales(form, m.block, count);
        m.codes = bytes(tiles * in * LANES * (EIGHT_BITS(form) ? 8 : SIX_BITS(form) ? 6 : 4) / 8);
        for (int which = 0; which < (HAS_OFFSETS(form) && !SUPER_SCALES(form) ? 2 : 1); which++) {
            uint8_t *made = bytes(tiles * scales);
            const int64_t step = super_bytes(form, m.block);
            if (HALF_SCALES(form)) some_halves((uint16_t *)made, tiles * scales / 2, wild);
            else if (!SUPER_SCALES(form)) memcpy(made, floats(tiles * scales / 4, wild), tiles * scales);
            else for (int64_t at = 0; at < tiles * scales; at += step)
                some_halves((uint16_t *)(made + at), (HAS_OFFSETS(form) ? 2 : 1) * LANES, wild);
            if (which) m.offsets = made;
            else m.scales = made;
        }
    }
    return m;
}

static const int ALL_FORMS[] = {FORM_F32,  FORM_BF16,   FORM_F16,    FORM_Q4,      FORM_Q4_HALF, FORM_NF4,  FORM_Q4_K,
                            FORM_Q3_K, FORM_Q8_PLAIN, FORM_Q8_HALF, FORM_F32_COLUMNS, FORM_Q6,   FORM_Q6_HALF, FORM_Q5_K,
                            FORM_Q6_K, FORM_IQ4_NL, FORM_IQ4_XS, FORM_MXFP4,   FORM_Q2_K};

/* What is drawn for a matrix: how large it is at most, how many rows it is multiplied with at least, by how many threads.
 * `pool`: values that are drawn, of which each row has some that stand behind each other; 0: all rows are drawn. */
struct effort { int64_t outputs, inputs, rows, threads, pool; };

/* Of the matrix and rows, in several batches; how many rows. */
static int64_t product(int number, struct effort effort) {
    static const int64_t counts[] = {1, 2, 3, 4, 5, 8, 11, 16, 32, 33};
    const int form = ALL_FORMS[number % COUNT(ALL_FORMS)], wild = (int)below(2);
    const int64_t unit = effort.pool && !SUPER_SCALES(form) ? 64 : 256;
    const int64_t out = 16 + below(effort.outputs), in = unit * (1 + below(effort.inputs * (256 / unit)));
    int64_t rows = counts[below(COUNT(counts))], done = 0;
    struct matrix m = matrix(form, form == FORM_F32_COLUMNS ? out / LANES * LANES : out, in, wild, (int)below(2));
    m.rounds = below(3) == 0;
    const float *pool = effort.pool ? floats(effort.pool, wild) : NULL;
    for (const int kept = drawn_arrays;; rows = counts[below(COUNT(counts))]) {
        const int64_t given = rows * in, made = rows * (m.out + LANES);
        float *x = pool ? memory(given * sizeof(float)) : floats(given, wild);
        for (int64_t r = 0; pool && r < rows; r++) memcpy(x + r * in, pool + below(effort.pool - in), in * sizeof(float));
        float *y = pool ? memory(made * sizeof(float)) : floats(made, 0);
        float *scratch = partly(rows * SCRATCH_FLOATS(in), pool ? 0 : 2 * given);
        petalnode_multiply(&m, x, rows, y, scratch, 1 + below(effort.threads));
        look_at(y, rows * m.out);
        forget(kept);
        if ((done += rows) >= effort.rows) break;
    }
    forget(0);
    return done;
}

/* A block's matrix of any form that blocks have and rows of `in` fit. */
static struct matrix layer(int64_t out, int64_t in, int64_t rounds, int with_bias) {
    int form;
    do form = ALL_FORMS[below(COUNT(ALL_FORMS))];
    while (in % (SUPER_SCALES(form) ? SUPER : 64));
    struct matrix m = matrix(form == FORM_F32_COLUMNS ? FORM_F32 : form, out, in, 0, with_bias);
    m.rounds = rounds;
    return m;
}

/* A delta rule of any layout, and what it needs of `shape`. */
static struct delta rule(int64_t hidden, int64_t rounds, struct shape *shape) {
    const int64_t by_head = below(2), low = by_head ? 0 : below(2), key_heads = 1 << below(2), heads = key_heads << below(2);
    const int64_t key_dim = 16 << below(2), value_dim = 16 << below(2), keys = key_heads * key_dim, values = heads * value_dim;
    const int64_t decays = low ? key_dim : 1, sizes[] = {keys, keys, values, values, heads, heads * decays}, taps = 2 + below(3);
    struct delta d = {.projections = (int32_t)(by_head ? 2 : 6 + low), .key_heads = (int32_t)key_heads, .heads = (int32_t)heads,
                      .key_dim = (int32_t)key_dim, .value_dim = (int32_t)value_dim, .decays = (int32_t)decays, .taps = (int32_t)taps,
                      .held = (int32_t)(taps - below(2)), .gate = below(2) ? ACTIVATION_SILU : ACTIVATION_LOGISTIC,
                      .most = below(2) ? 1.0f : 2.0f, .eps = 1e-6f, .taps_of = floats((2 * keys + values) * taps, 0),
                      .bias = below(2) ? floats(2 * keys + values, 0) : NULL, .rates = floats(heads, 0),
                      .moved = floats(heads * decays, 0), .norm = floats(value_dim, 0)};
    const int64_t groups = by_head ? key_heads : 1;
    int64_t outs[PROJECTIONS] = {0}, all = 0;
    if (low) outs[5] = 64;
    for (int part = 0; part < PARTS_OF_DELTA; part++) {
        const int number = by_head ? part / 4 : part + (low && part == PART_DECAY);
        d.parts[part] = (struct values){number, (int32_t)outs[number], (int32_t)(sizes[part] / groups), 0};
        outs[number] += sizes[part] / groups;
    }
    for (int part = 0; part < PARTS_OF_DELTA; part++) d.parts[part].pitch = (int32_t)outs[d.parts[part].projection];
    for (int number = 0; number < d.projections; number++) {
        d.of[number] = number == 6 ? 5 : -1;
        d.projection[number] = layer(groups * outs[number], number == 6 ? 64 : hidden, rounds, 0);
        all += groups * outs[number];
    }
    shape->mixing = (int32_t)most(shape->mixing, all + 2 * keys + 3 * values + heads * (1 + decays));
    shape->mixed = (int32_t)most(shape->mixed, values), shape->inner = (int32_t)most(shape->inner, values);
    return d;
}

/* So many tokens of each session, the first of which begins with a few at once, through two blocks of any family; how
 * many steps of a session that were. `narrow`: a quarter as wide, too narrow for scales of scales. */
static int64_t steps(int64_t sessions, int64_t tokens, int64_t most_threads, int narrow) {
    enum { BLOCKS = 2, SESSIONS = 3, LONGEST = 40, PROMPT = 5 };
    const int64_t hidden = narrow ? 64 : 256;
    const int64_t latent = below(4) ? 0 : hidden, plain = latent ? 64 << below(2) : 0, low = latent && below(2) ? hidden : 0;
    const int64_t heads = 2 << below(2), dim = latent ? plain + (16 << below(3)) : (narrow ? 16 : 32) << below(2);
    const int64_t value_dim = latent ? 16 << below(3) : dim, shared = 1 << below(2), kv = latent ? 1 : heads / shared;
    const int64_t inner = hidden << below(2), held = below(3), experts = below(3) ? 0 : 4, biased = below(2), rounds = below(4) == 0;
    const int64_t in_turns = experts && below(2), shared_one = experts && below(2);
    const int64_t turned = latent ? dim - plain : below(2) ? dim : dim / 2, gated = experts || below(4), activation = 1 + below(2);
    struct shape shape = {.hidden = (int32_t)hidden, .heads = (int32_t)heads, .kv_heads = (int32_t)kv, .head_dim = (int32_t)dim,
                          .inner = (int32_t)(in_turns ? 2 * inner : inner), .rotary_dim = (int32_t)turned, .activation = (int32_t)activation,
                          .chosen = 2, .shares_add_up = (int32_t)below(2), .held = (int32_t)held, .eps = 1e-6f,
                          .softcap = below(3) ? 0.0f : 30.0f, .routing = (int32_t)below(3),
                          .groups = 1 + (int32_t)below(2), .kept = 1, .routed_scale = below(2) ? 1.0f : 2.5f,
                          .alpha = 1.702f, .limit = 7.0f, .latent = (int32_t)latent, .low = (int32_t)low, .latent_eps = 1e-5f,
                          .value_dim = (int32_t)value_dim, .pairs = latent ? (int32_t)below(3) : 0};
    struct block blocks[BLOCKS];
    struct matrix expert[BLOCKS][12], latents[BLOCKS][8];
    struct delta delta[BLOCKS];
    float *states[SESSIONS][5 * BLOCKS];
    const int64_t half = !latent && below(3) == 0, wide = heads * value_dim; /* queries with a gate */
    int64_t attending = 0, mixing = 0;
    if (half) shape.inner = (int32_t)most(shape.inner, 2 * wide);
    for (int index = 0; index < BLOCKS; index++) {
        struct block b = {.input_norm = floats(hidden, 0), .output_norm = floats(hidden, 0), .window = below(2) ? 0 : 8,
                          .experts = (int32_t)experts, .scale = 0.125f};
        if (biased) b.input_bias = floats(hidden, 0), b.output_bias = floats(hidden, 0);
        b.whole = !half && !latent && below(4) == 0;
        if (latent) b.query_norm = floats(hidden, 0), b.key_norm = floats(latent, 0), b.turned = (int32_t)below(2);
        else if (b.whole || below(2)) b.query_norm = floats(b.whole ? wide : dim, 0), b.key_norm = floats(b.whole ? kv * dim : dim, 0);
        if (below(2)) b.sinks = floats(heads, 0);
        if (below(2)) b.attention_norm = floats(hidden, 0), b.mlp_norm = floats(hidden, 0);
        if (below(4) == 0) b.input_norm = b.output_norm = NULL;
        b.query = layer((1 + half) * heads * dim, hidden, rounds, (int)biased);
        b.key = layer(latent ? latent + turned : kv * dim, hidden, rounds, (int)biased);
        if (low) b.low = layer(low, hidden, rounds, (int)biased);
        if (!latent) b.value = layer(kv * dim, hidden, rounds, (int)biased);
        for (int64_t h = 0; latent && h < heads; h++) {
            latents[index][2 * h] = b.turned ? layer(plain, latent, 0, 0) : layer(latent, plain, 0, 0);
            latents[index][2 * h + 1] = layer(value_dim, latent, 0, 0);
        }
        b.latent = latents[index];
        if (below(3)) attending++;
        else {
            delta[index] = rule(hidden, rounds, &shape), b.delta = delta + index;
            const int64_t values = b.delta->heads * b.delta->value_dim;
            const int64_t channels = 2 * b.delta->key_heads * b.delta->key_dim + values;
            for (int64_t r = 0; r < sessions; r++) {
                float **own = states[r] + 5 * mixing;
                own[0] = own[1] = memory(channels * b.delta->held * sizeof(float));
                own[2] = r ? memory(values * b.delta->key_dim * sizeof(float)) : NULL;
                own[3] = r ? own[2] : memory(values * b.delta->key_dim * sizeof(float));
                own[4] = NULL;
            }
            mixing++;
        }
        const int64_t mixed = b.delta ? b.delta->heads * b.delta->value_dim : wide;
        b.output = mixed < 256 ? matrix(FORM_F32, hidden, mixed, 0, 0) : layer(hidden, mixed, rounds, 0);
        b.output.rounds = rounds;
        if (experts) {
            b.router = matrix(FORM_F32, experts, hidden, 0, 0);
            if (below(2)) b.favours = floats(experts, 0);
            if (biased) b.router.bias = floats(experts + LANES, 0);
            for (int e = 0; e < 12; e++) {
                if (in_turns && e % 3 == 1) expert[index][e] = (struct matrix){.form = FORM_F32};
                else if (e % 3 < 2) expert[index][e] = layer(in_turns ? 2 * inner : inner, hidden, rounds, (int)biased);
                else expert[index][e] = layer(hidden, inner, rounds, (int)biased);
            }
            b.expert = expert[index];
        }
        if (!experts || shared_one) {
            if (gated) b.gate = layer(inner, hidden, rounds, 0);
            b.up = layer(inner, hidden, rounds, 0), b.down = layer(hidden, inner, rounds, 0);
            if (experts && below(2)) b.shared = floats(hidden, 0);
        }
        blocks[index] = b;
    }
    struct row rows[SESSIONS];
    for (int r = 0; r < sessions; r++)
        rows[r] = (struct row){.memory = memory(most(attending, 1) * 2 * kv * LONGEST * key_bytes((int32_t)held, latent ? latent : dim)), .batch = 1,
                               .max_length = LONGEST, .padding = r ? 2 : 0, .states = states[r]};
    const int64_t threads = 1 + below(most_threads), of_heads = latent ? most(ATTENDED * LONGEST, PROMPT * (dim + value_dim + latent)) : heads * LONGEST;
    const int64_t most_scores = most(of_heads, (PROMPT + 1) * (experts + 1)) + LANES;
    const int64_t floats_beside = petalnode_step_scratch(&shape, PROMPT, most_scores, threads) + LANES;
    float *scratch = partly(floats_beside, floats_beside - PROMPT * widths_of(&shape).most);
    int64_t counts[2] = {0, 0};
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t number = token ? sessions : PROMPT;
        struct row prompt[PROMPT];
        for (int64_t r = 0; r < PROMPT; r++) prompt[r] = rows[0], prompt[r].length = r;
        float *hidden_rows = floats(number * hidden, 0), *cosines = floats(number * turned, 0), *sines = floats(number * turned, 0);
        float *frequencies = floats(turned / 2, 0);
        int64_t *positions = bytes(8 * number);
        for (int64_t i = 0; i < turned / 2; i++) frequencies[i] = bits_float(float_bits(frequencies[i]) & 0x7fffffffu) / 4.0f;
        for (int64_t r = 0; r < number; r++) positions[r] = below(1 << (3 + below(17)));
        petalnode_rotary(frequencies, turned / 2, 1.0f, positions, number, cosines, sines);
        struct step step = {.shape = &shape, .blocks = blocks, .rows = token ? rows : prompt, .several = token ? 0 : PROMPT, .count = BLOCKS, .number = number,
                            .score_count = most_scores, .cosines = cosines, .sines = sines, .hidden = hidden_rows, .counts = counts,
                            .scratch = scratch};
        petalnode_step(&step, threads);
        look_at(hidden_rows, number * hidden);
        for (int64_t r = 0; r < sessions; r++) rows[r].length += token ? 1 : r ? 0 : PROMPT;
        for (int64_t index = 0; index < mixing; index++) states[0][5 * index + 2] = states[0][5 * index + 3];
    }
    forget(0);
    return 1 + (tokens - 1) * sessions;
}

static void begin(uint64_t seed) { state = 0x9e3779b97f4a7c15ull * seed + 1, digest = 0xcbf29ce484222325ull; }

/* Of so many matrices, and of these and so many rounds of steps, by the kernels in use, into found [2]. One call at a time. */
EXPORT void petalnode_vectors(uint64_t seed, int64_t matrices, int64_t rounds, uint64_t *found) {
    const struct effort once = {.outputs = 100, .inputs = 2, .rows = 1, .threads = 2};
    begin(seed);
    for (int64_t done = 0; done < matrices; done++) product((int)(done % COUNT(ALL_FORMS)), once);
    found[0] = digest;
    for (int64_t done = 0; done < rounds; done++) steps(2, 9, 2, 0);
    found[1] = digest;
}

/* The same of at least so many products of a matrix and a row, and steps of a session, for which much less is drawn. */
EXPORT void petalnode_many(uint64_t seed, int64_t products, int64_t wanted, uint64_t *found) {
    begin(seed);
    for (int64_t done = 0, number = 0; done < products; number++) {
        const int64_t large = number % 32 == 0;
        const struct effort effort = {.outputs = large ? 100 : 2, .inputs = 1 + large, .rows = 200, .threads = 1 + large, .pool = 2048};
        done += product((int)(number % COUNT(ALL_FORMS)), effort);
    }
    found[0] = digest;
    for (int64_t done = 0, number = 0; done < wanted; number++) done += steps(3, 33, 1 + (number % 8 == 0), number % 8 != 0);
    found[1] = digest;
}
