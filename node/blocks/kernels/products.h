/* Products of matrices with a few rows: compiled for each instruction set. */
/* `total` values added up in lanes, then the lanes. */
INLINE float NAME(dot)(const float *x, const float *y, int64_t count) {
    V sum = NAME(zero)();
    for (int64_t index = 0; index < count; index += LANES)
        sum = NAME(fma)(NAME(load)(x + index), NAME(load)(y + index), sum);
    return NAME(total)(sum);
}

/* --- products with tiles of 16 rows side by side --- */

INLINE V NAME(number)(const void *from, int64_t place, int half) {
    return half ? NAME(half)((const uint16_t *)from + place) : NAME(load)((const float *)from + place);
}

/* The sums of a tile and the bias, as far as the row has so many outputs. */
INLINE void NAME(put)(const struct matrix *m, int64_t tile, V sums, float *y) {
    const int64_t first = tile * LANES, left = m->out - first;
    if (left >= LANES) {
        NAME(store)(y + first, m->bias ? NAME(add)(sums, NAME(load)(m->bias + first)) : sums);
        return;
    }
    float last[LANES];
    NAME(store)(last, sums);
    for (int64_t lane = 0; lane < left; lane++) y[first + lane] = last[lane] + (m->bias ? m->bias[first + lane] : 0.0f);
}

/* `tiles` tiles from `tile` on, times `rows` rows of x. `kind`: 4 (codes), 5 (NF4) or 8. Meanwhile as much is fetched of
 * the tiles that come next, with their scales: those behind, or the first ones of `next`. One row takes less time than
 * its weights take to come from memory. */
INLINE void NAME(tile_product)(const struct matrix *m, int kind, int tiles, int rows, int64_t tile, const float *x,
                        const float *sums, float *y, const struct matrix *next) {
    const int half = HALF_SCALES(m->form), offset = HAS_OFFSETS(m->form);
    const int64_t in = m->in, block = m->block, count = in / block;
    const int64_t words = kind == 8 ? in * LANES : in / 8 * LANES; /* of a tile */
    const struct ahead ahead = ahead_of(m, tile + tiles, words * (kind == 8 ? 1 : 4), count, next);
    V total[MOST_TILES][MOST_ROWS];
    UNROLL for (int t = 0; t < tiles; t++)
        UNROLL for (int r = 0; r < rows; r++) total[t][r] = NAME(zero)();
    for (int64_t number = 0; number < count; number++) {
        V part[MOST_TILES][MOST_ROWS];
        UNROLL for (int t = 0; t < tiles; t++)
            UNROLL for (int r = 0; r < rows; r++) part[t][r] = NAME(zero)();
        const float *xs = x + number * block;
        if (kind == 8) {
            const int8_t *codes = (const int8_t *)m->codes + tile * words + number * block * LANES;
            for (int64_t k = 0; k < block; k++) {
                V w[MOST_TILES];
                UNROLL for (int t = 0; t < tiles; t++) {
                    w[t] = NAME(bytes)(codes + t * words + k * LANES);
                    if (k % 4 == 0) __builtin_prefetch(ahead.codes + t * words + (number * block + k) * LANES);
                }
                UNROLL for (int r = 0; r < rows; r++) {
                    V value = NAME(set)(xs[r * in + k]);
                    UNROLL for (int t = 0; t < tiles; t++) part[t][r] = NAME(fma)(w[t], value, part[t][r]);
                }
            }
        } else {
            const uint32_t *codes = (const uint32_t *)m->codes + tile * words + number * block / 8 * LANES;
            for (int64_t k = 0; k < block; k += 8) {
                I eight[MOST_TILES];
                UNROLL for (int t = 0; t < tiles; t++) {
                    eight[t] = NAME(words)(codes + t * words + k / 8 * LANES);
                    __builtin_prefetch(ahead.codes + 4 * (t * words + (number * block + k) / 8 * LANES));
                }
                UNROLL for (int j = 0; j < 8; j++) {
                    V w[MOST_TILES];
                    UNROLL for (int t = 0; t < tiles; t++)
                        w[t] = kind == 5 ? NAME(table4)(eight[t], j) : NAME(signed4)(eight[t], j);
                    UNROLL for (int r = 0; r < rows; r++) {
                        V value = NAME(set)(xs[r * in + k + j]);
                        UNROLL for (int t = 0; t < tiles; t++) part[t][r] = NAME(fma)(w[t], value, part[t][r]);
                    }
                }
            }
        }
        UNROLL for (int t = 0; t < tiles; t++) {
            int64_t place = ((tile + t) * count + number) * LANES;
            fetch_scales(ahead, t * count + number, half, offset);
            V scale = NAME(number)(m->scales, place, half);
            UNROLL for (int r = 0; r < rows; r++) total[t][r] = NAME(fma)(scale, part[t][r], total[t][r]);
            if (offset) {
                V add = NAME(number)(m->offsets, place, half);
                if (kind == 4) add = NAME(fma)(scale, NAME(set)(8.0f), add); /* codes are held as code - 8 */
                UNROLL for (int r = 0; r < rows; r++)
                    total[t][r] = NAME(fma)(add, NAME(set)(sums[r * count + number]), total[t][r]);
            }
        }
    }
    UNROLL for (int t = 0; t < tiles; t++)
        UNROLL for (int r = 0; r < rows; r++) NAME(put)(m, tile + t, total[t][r], y + (int64_t)r * m->out);
}

/* A function for each kind and size of tile: `rows` rows of x and as many tiles of the matrix as registers hold. */
#define TILES(kind, rows, tiles)                                                                                      \
    static __attribute__((noinline)) void NAME(many_##kind##_##rows)(                                                 \
        const struct matrix *m, int64_t tile, const float *x, const float *sums, float *y, const struct matrix *next) { \
        NAME(tile_product)(m, kind, tiles, rows, tile, x, sums, y, next);                                             \
    }                                                                                                                 \
    static __attribute__((noinline)) void NAME(one_##kind##_##rows)(                                                  \
        const struct matrix *m, int64_t tile, const float *x, const float *sums, float *y, const struct matrix *next) { \
        NAME(tile_product)(m, kind, 1, rows, tile, x, sums, y, next);                                                 \
    }
#if ROW_TILE >= 8
#define ALL_TILES(kind) TILES(kind, 1, TILES_ONE) TILES(kind, 2, TILES_ONE) TILES(kind, 4, TILES_MANY) TILES(kind, 8, TILES_MANY)
#define CHOICES(kind)                                                                                                 \
    { CHOICE(kind, 8, TILES_MANY), CHOICE(kind, 4, TILES_MANY), CHOICE(kind, 2, TILES_ONE), CHOICE(kind, 1, TILES_ONE) }
#elif ROW_TILE >= 4
#define ALL_TILES(kind) TILES(kind, 1, TILES_ONE) TILES(kind, 2, TILES_ONE) TILES(kind, 4, TILES_MANY)
#define CHOICES(kind) { CHOICE(kind, 4, TILES_MANY), CHOICE(kind, 2, TILES_ONE), CHOICE(kind, 1, TILES_ONE) }
#else
#define ALL_TILES(kind) TILES(kind, 1, TILES_ONE) TILES(kind, 2, TILES_ONE)
#define CHOICES(kind) { CHOICE(kind, 2, TILES_ONE), CHOICE(kind, 1, TILES_ONE) }
#endif
#define CHOICE(kind, rows, tiles) {rows, tiles, NAME(many_##kind##_##rows), NAME(one_##kind##_##rows)}
ALL_TILES(4)
ALL_TILES(5)
ALL_TILES(8)
static const struct choice NAME(choices_4)[] = CHOICES(4), NAME(choices_5)[] = CHOICES(5), NAME(choices_8)[] = CHOICES(8);

/* What the offsets of a matrix are multiplied with: sums of each block of each row, [rows][in / block]. */
static void NAME(block_sums)(const struct matrix *m, const float *x, int64_t rows, float *sums) {
    if (m->form < FORM_Q4 || !HAS_OFFSETS(m->form)) return;
    for (int64_t place = 0; place < rows * m->in; place += m->block) {
        V sum = NAME(zero)();
        for (int64_t k = 0; k < m->block; k += LANES) sum = NAME(add)(sum, NAME(load)(x + place + k));
        *sums++ = NAME(total)(sum);
    }
}

/* Tiles `tile` .. `end` - 1. The rows are taken a few at a time, while the tiles' weights stay in a near cache. */
static void NAME(tiled)(const struct matrix *m, const struct choice *choices, int64_t tile, int64_t end, const float *x,
                        int64_t rows, float *y, const float *sums, const struct matrix *next) {
    const int64_t count = m->in / m->block, from = tile;
    const struct choice *choice = choices;
    for (int64_t done = 0; done < rows; done += choice->rows) {
        while (choice->rows > rows - done) choice++; /* the largest first, rows of one at the end */
        const float *xs = x + done * m->in, *of_blocks = sums + done * count;
        float *ys = y + done * m->out;
        for (tile = from; tile + choice->tiles <= end; tile += choice->tiles) choice->many(m, tile, xs, of_blocks, ys, next);
        for (; tile < end; tile++) choice->one(m, tile, xs, of_blocks, ys, next);
    }
}
#undef TILES
#undef ALL_TILES
#undef CHOICES
#undef CHOICE

/* --- products with row-major weights: lanes run along the inputs --- */

INLINE V NAME(weights)(const struct matrix *m, int64_t place, int form) {
    if (form == FORM_F32) return NAME(load)((const float *)m->codes + place);
    if (form == FORM_BF16) return NAME(brain)((const uint16_t *)m->codes + place);
    return NAME(half)((const uint16_t *)m->codes + place);
}

INLINE void NAME(outputs)(const struct matrix *m, int form, int outputs, int rows, int64_t first, const float *x, float *y) {
    const int64_t in = m->in;
    V total[OUTPUTS][4];
    UNROLL for (int o = 0; o < outputs; o++)
        UNROLL for (int r = 0; r < rows; r++) total[o][r] = NAME(zero)();
    for (int64_t k = 0; k < in; k += LANES) {
        V value[4];
        UNROLL for (int r = 0; r < rows; r++) value[r] = NAME(load)(x + r * in + k);
        UNROLL for (int o = 0; o < outputs; o++) {
            V w = NAME(weights)(m, (first + o) * in + k, form);
            const int size = form == FORM_F32 ? 4 : 2;
            if (k % (64 / size) == 0) /* for the outputs that come next */
                __builtin_prefetch((const char *)m->codes + ((first + outputs + o) * in + k) * size);
            UNROLL for (int r = 0; r < rows; r++) total[o][r] = NAME(fma)(w, value[r], total[o][r]);
        }
    }
    UNROLL for (int o = 0; o < outputs; o++)
        UNROLL for (int r = 0; r < rows; r++) {
            float bias = m->bias ? m->bias[first + o] : 0.0f;
            y[(int64_t)r * m->out + first + o] = NAME(total)(total[o][r]) + bias;
        }
}

static void NAME(row_major)(const struct matrix *m, int form, int64_t from, int64_t to, const float *x, int64_t rows, float *y) {
    /* Outputs outside, in panels that stay in the processor's nearest cache while all rows are taken. */
    for (int64_t panel = from; panel < to; panel += 16) {
        int64_t end = panel + 16 < to ? panel + 16 : to;
        for (int64_t done = 0; done < rows;) {
            int take = rows - done >= 4 && ROW_TILE >= 4 ? 4 : rows - done >= 2 ? 2 : 1;
            const float *xs = x + done * m->in;
            float *ys = y + done * m->out;
            int64_t first = panel;
            for (; first + OUTPUTS <= end; first += OUTPUTS) {
                if (take == 4) NAME(outputs)(m, form, OUTPUTS, 4, first, xs, ys);
                else if (take == 2) NAME(outputs)(m, form, OUTPUTS, 2, first, xs, ys);
                else NAME(outputs)(m, form, OUTPUTS, 1, first, xs, ys);
            }
            for (; first < end; first++) {
                if (take == 4) NAME(outputs)(m, form, 1, 4, first, xs, ys);
                else if (take == 2) NAME(outputs)(m, form, 1, 2, first, xs, ys);
                else NAME(outputs)(m, form, 1, 1, first, xs, ys);
            }
            done += take;
        }
    }
}

/* --- products with float32 weights whose columns stand one behind the other (Conv1D): lanes run along the outputs --- */

INLINE void NAME(columns)(const struct matrix *m, int vectors, int64_t first, const float *x, float *y) {
    V total[4];
    UNROLL for (int v = 0; v < vectors; v++) total[v] = NAME(zero)();
    for (int64_t k = 0; k < m->in; k++) {
        V value = NAME(set)(x[k]);
        UNROLL for (int v = 0; v < vectors; v++)
            total[v] = NAME(fma)(NAME(load)((const float *)m->codes + k * m->block + first + v * LANES), value, total[v]);
    }
    UNROLL for (int v = 0; v < vectors; v++) {
        if (m->bias) total[v] = NAME(add)(total[v], NAME(load)(m->bias + first + v * LANES));
        NAME(store)(y + first + v * LANES, total[v]);
    }
}

/* --- rows of 8 bits --- */

/* `count` values, up to ROUND, of which all or none are finite numbers when it returns: scale, sums, codes and values. */
INLINE void NAME(round_block)(const float *x, int64_t count, float *values, float *scale, int32_t *sums, int8_t *codes) {
    uint32_t largest = 0;
    for (int64_t k = 0; k < count; k++) {
        uint32_t size = float_bits(x[k]) & 0x7fffffffu;
        largest = size > largest ? size : largest;
    }
    float most = bits_float(largest);
    if (largest >= 0x7f800000u) most = bits_float(0x7fc00000u);
    float turns = most > 1e-30f ? 127.0f / most : 0.0f;
    *scale = most > 1e-30f ? most / 127.0f : 0.0f * most;
    for (int64_t k = 0; k < count; k++) values[k] = x[k] * turns + 12582912.0f - 12582912.0f; /* to even, by 1.5 * 2^23 */
    if (turns == 0.0f)
        for (int64_t k = 0; k < count; k++) values[k] = 0.0f;
    for (int64_t k = 0; k < count; k++) codes[k] = (int8_t)(int32_t)values[k];
    for (int64_t k = 0; k < count; k++) values[k] *= *scale;
    for (int64_t first = 0; first < count; first += 16) {
        int32_t sum = 0;
        for (int64_t k = first; k < first + 16; k++) sum += codes[k];
        sums[first / 16] = sum;
    }
}

/* Rows [rows][in] for the product with `count` matrices; all of `memory` that is needed. */
static struct rounded NAME(round_rows)(const struct matrix *const *m, int64_t count, const float *x, int64_t rows,
                                       float *memory) {
    const int64_t in = m[0]->in, blocks = (in + ROUND - 1) / ROUND;
    int four = 0;
    for (int64_t index = 0; index < count; index++) four |= m[index]->form == FORM_Q4 || m[index]->form == FORM_Q4_WIDE;
    float *values = memory, *scales = values + rows * in, *moved = scales + rows * blocks;
    int32_t *sums = (int32_t *)(moved + rows * blocks);
    int8_t *codes8 = (int8_t *)(sums + rows * in / 16), *codes4 = codes8 + rows * in;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t from = 0; from < in; from += ROUND) {
            const int64_t place = r * in + from;
            float *scale = scales + r * blocks + from / ROUND;
            if (in - from >= ROUND)
                NAME(round_block)(x + place, ROUND, values + place, scale, sums + place / 16, codes8 + place);
            else NAME(round_block)(x + place, in - from, values + place, scale, sums + place / 16, codes8 + place);
        }
    if (in % ROUND == 0)
        for (int64_t block = 0; block < rows * blocks; block++)
            moved[block] = scales[block] * (float)(sums[2 * block] + sums[2 * block + 1]);
    if (four)
        for (int64_t place = 0; place < rows * in; place += 8)
            for (int64_t k = 0; k < 8; k++) codes4[place + k] = codes8[place + 2 * (k % 4) + k / 4];
    return (struct rounded){values, scales, moved, sums, codes4, codes8};
}

/* --- products of any form --- */

/* Outputs GROUP piece .. GROUP (piece + 1) - 1, as far as there are so many. `rounded`: x, where it is rounded. `next`: the
 * matrix that is multiplied after this one. */
static void NAME(outputs_of)(const struct matrix *m, int64_t piece, const float *x, int64_t rows, float *y, const float *sums,
                             const struct rounded *rounded, const struct matrix *next) {
    const int64_t from = piece * GROUP, to = from + GROUP < m->out ? from + GROUP : m->out;
    const int64_t tile = from / LANES, end = (to + LANES - 1) / LANES;
    if (rounded && BY_BYTES(m)) {
        chosen->multiply_bytes(m, tile, end, rounded, rows, y);
        return;
    }
    if (rounded) x = rounded->values;
    switch (m->form) {
    case FORM_F32: NAME(row_major)(m, FORM_F32, from, to, x, rows, y); break;
    case FORM_BF16: NAME(row_major)(m, FORM_BF16, from, to, x, rows, y); break;
    case FORM_F16: NAME(row_major)(m, FORM_F16, from, to, x, rows, y); break;
    case FORM_F32_COLUMNS:
        for (int64_t r = 0; r < rows; r++) {
            int64_t first = from;
            for (; first + 4 * LANES <= to; first += 4 * LANES) NAME(columns)(m, 4, first, x + r * m->in, y + r * m->out);
            for (; first < to; first += LANES) NAME(columns)(m, 1, first, x + r * m->in, y + r * m->out);
        }
        break;
    case FORM_Q4: case FORM_Q4_WIDE: NAME(tiled)(m, NAME(choices_4), tile, end, x, rows, y, sums, next); break;
    case FORM_NF4: NAME(tiled)(m, NAME(choices_5), tile, end, x, rows, y, sums, next); break;
    default: NAME(tiled)(m, NAME(choices_8), tile, end, x, rows, y, sums, next);
    }
}

/* A product of a matrix, ready to be done in pieces of GROUP outputs. */
struct NAME(product) { const struct matrix *m; const float *x; int64_t rows; float *y; const float *sums; const struct rounded *rounded; };

static void NAME(product_piece)(const void *job, int64_t piece, int64_t thread) {
    const struct NAME(product) *p = job;
    (void)thread;
    NAME(outputs_of)(p->m, piece, p->x, p->rows, p->y, p->sums, p->rounded, p->m);
}

static void NAME(multiply)(const struct matrix *m, const float *x, int64_t rows, float *y, float *scratch, int64_t threads) {
    struct rounded rounded;
    struct NAME(product) job = {m, x, rows, y, scratch, m->rounds ? &rounded : NULL};
    if (m->rounds) rounded = NAME(round_rows)(&m, 1, x, rows, scratch);
    else NAME(block_sums)(m, x, rows, scratch);
    do_pieces(threads, NAME(product_piece), &job, GROUPS(m));
}

static void NAME(unpack)(const struct matrix *m, int64_t first, int64_t last, float *panel) {
    const int64_t in = m->in, count = in / m->block, width = (last - first) * LANES;
    const int half = HALF_SCALES(m->form), offset = HAS_OFFSETS(m->form);
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t number = 0; number < count; number++) {
            int64_t place = (tile * count + number) * LANES;
            V scale = NAME(number)(m->scales, place, half), add = NAME(zero)();
            if (offset) add = NAME(number)(m->offsets, place, half);
            for (int64_t k = number * m->block; k < (number + 1) * m->block; k++) {
                float *into = panel + k * width + (tile - first) * LANES;
                V code;
                if (m->form >= FORM_Q8) code = NAME(bytes)((const int8_t *)m->codes + (tile * in + k) * LANES);
                else {
                    I words = NAME(words)((const uint32_t *)m->codes + (tile * (in / 8) + k / 8) * LANES);
                    code = m->form == FORM_NF4 ? NAME(table4)(words, (int)(k % 8))
                                               : NAME(add)(NAME(signed4)(words, (int)(k % 8)), NAME(set)(8.0f));
                }
                /* scale * code has few enough bits to be exact where an offset is added: one rounding in all */
                NAME(store)(into, offset ? NAME(fma)(scale, code, add) : NAME(mul)(scale, code));
            }
        }
}
