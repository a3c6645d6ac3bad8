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

/* The scales of block `number` of a tile, and its offsets, which are not there in every form. */
INLINE V NAME(scales)(const struct matrix *m, int form, int64_t tile, int64_t count, int64_t number, V *offsets) {
    if (!SUPER_SCALES(form)) {
        const int64_t place = (tile * count + number) * LANES;
        if (HAS_OFFSETS(form)) *offsets = NAME(half)((const uint16_t *)m->offsets + place);
        return NAME(number)(m->scales, place, HALF_SCALES(form));
    }
    const int shift = SUPER_SHIFT(m->block), offset = HAS_OFFSETS(form);
    const int8_t *of = (const int8_t *)m->scales + tile * tile_scales(form, m->block, count);
    of += (number >> shift) * super_bytes(form, m->block);
    const int8_t *own = of + (offset ? 4 : 2) * LANES + (number & ((1 << shift) - 1)) * (offset ? 2 : 1) * LANES;
    if (offset) *offsets = NAME(mul)(NAME(half)((const uint16_t *)of + LANES), NAME(bytes)(own + LANES));
    return NAME(mul)(NAME(half)((const uint16_t *)of), NAME(bytes)(own));
}

/* The values of the codes of 4 bits that are looked up. */
INLINE const float *NAME(table)(int form) {
    return form == FORM_NF4 ? NF4_TABLE : form == FORM_MXFP4 ? MXFP4_TABLE : IQ4_TABLE;
}

/* The sums of a tile and the bias, as far as the row has outputs. */
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

/* `tiles` tiles from `tile` on, times `rows` rows of x. `kind`: 4 (codes), 5 (looked up), 6 or 8. Meanwhile as much is fetched of
 * the tiles that come next, with their scales: those behind, or the first ones of `next`. One row takes less time than
 * its weights take to come from memory. */
INLINE void NAME(tile_product)(const struct matrix *m, int kind, int tiles, int rows, int64_t tile, const float *x,
                        const float *sums, float *y, const struct matrix *next) {
    const int form = m->form, offset = HAS_OFFSETS(form);
    const int64_t in = m->in, block = m->block, count = in / block;
    const int64_t words = kind == 8 ? in * LANES : kind == 6 ? in / 16 * 3 * LANES : in / 8 * LANES; /* of a tile */
    const struct ahead ahead = ahead_of(m, tile + tiles, words * (kind == 8 ? 1 : 4), count, next);
    const float *table = NAME(table)(form);
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
        } else if (kind == 6) {
            const uint32_t *codes = (const uint32_t *)m->codes + tile * words + number * block / 16 * 3 * LANES;
            for (int64_t k = 0; k < block; k += 16, codes += 3 * LANES)
                UNROLL for (int eight = 0; eight < 2; eight++) {
                    I low[MOST_TILES], high[MOST_TILES];
                    UNROLL for (int t = 0; t < tiles; t++) {
                        low[t] = NAME(words)(codes + t * words + eight * LANES);
                        high[t] = NAME(words)(codes + t * words + 2 * LANES);
                        const int64_t place = t * words + ((number * block + k) / 16 * 3 + eight) * LANES;
                        __builtin_prefetch(ahead.codes + 4 * place);
                        if (eight) __builtin_prefetch(ahead.codes + 4 * (place + LANES));
                    }
                    UNROLL for (int j = 0; j < 8; j++) {
                        V w[MOST_TILES];
                        UNROLL for (int t = 0; t < tiles; t++) w[t] = NAME(signed6)(low[t], j, high[t], 8 * eight + j);
                        UNROLL for (int r = 0; r < rows; r++) {
                            V value = NAME(set)(xs[r * in + k + 8 * eight + j]);
                            UNROLL for (int t = 0; t < tiles; t++) part[t][r] = NAME(fma)(w[t], value, part[t][r]);
                        }
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
                        w[t] = kind == 5 ? NAME(table4)(eight[t], j, table) : NAME(signed4)(eight[t], j);
                    UNROLL for (int r = 0; r < rows; r++) {
                        V value = NAME(set)(xs[r * in + k + j]);
                        UNROLL for (int t = 0; t < tiles; t++) part[t][r] = NAME(fma)(w[t], value, part[t][r]);
                    }
                }
            }
        }
        UNROLL for (int t = 0; t < tiles; t++) {
            fetch_scales(ahead, t * count + number, form, block);
            V add = NAME(zero)(), scale = NAME(scales)(m, form, tile + t, count, number, &add);
            UNROLL for (int r = 0; r < rows; r++) total[t][r] = NAME(fma)(scale, part[t][r], total[t][r]);
            if (offset) {
                if (kind == 4) add = NAME(fma)(scale, NAME(set)(8.0f), add); /* codes are held as code - 8 */
                UNROLL for (int r = 0; r < rows; r++) {
                    const float *of = sums + (r * in + number * block) / LANES;
                    total[t][r] = NAME(fma)(add, NAME(set)(block > LANES ? of[0] + of[1] : of[0]), total[t][r]);
                }
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
ALL_TILES(6)
ALL_TILES(8)
static const struct choice NAME(choices_4)[] = CHOICES(4), NAME(choices_5)[] = CHOICES(5), NAME(choices_6)[] = CHOICES(6),
                           NAME(choices_8)[] = CHOICES(8);

/* What the offsets of a matrix are multiplied with: sums of 16 inputs each, of which a block has one or two. */
static void NAME(block_sums)(const struct matrix *m, const float *x, int64_t rows, float *sums) {
    if (!HAS_OFFSETS(m->form)) return;
    for (int64_t place = 0; place < rows * m->in; place += LANES) *sums++ = NAME(total)(NAME(load)(x + place));
}

/* Tiles `tile` .. `end` - 1. The rows are taken a few at a time, while the tiles' weights stay in a near cache. */
static void NAME(tiled)(const struct matrix *m, const struct choice *choices, int64_t tile, int64_t end, const float *x,
                        int64_t rows, float *y, const float *sums, const struct matrix *next) {
    const int64_t count = m->in / LANES, from = tile; /* sums of a row */
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

/* One row, or two. */
INLINE void NAME(outputs)(const struct matrix *m, int form, int outputs, int rows, int64_t first, const float *x, float *y) {
    const int64_t in = m->in;
    V total[OUTPUTS][2];
    UNROLL for (int o = 0; o < outputs; o++)
        UNROLL for (int r = 0; r < rows; r++) total[o][r] = NAME(zero)();
    for (int64_t k = 0; k < in; k += LANES) {
        V value[2];
        UNROLL for (int r = 0; r < rows; r++) value[r] = NAME(load)(x + r * in + k);
        UNROLL for (int o = 0; o < outputs; o++) {
            V w = NAME(weights)(m, (first + o) * in + k, form);
            if (k % (64 / VALUE_BYTES(form)) == 0) /* for the outputs that come next */
                __builtin_prefetch((const char *)m->codes + ((first + outputs + o) * in + k) * VALUE_BYTES(form));
            UNROLL for (int r = 0; r < rows; r++) total[o][r] = NAME(fma)(w, value[r], total[o][r]);
        }
    }
    UNROLL for (int o = 0; o < outputs; o++)
        UNROLL for (int r = 0; r < rows; r++) {
            float bias = m->bias ? m->bias[first + o] : 0.0f;
            y[(int64_t)r * m->out + first + o] = NAME(total)(total[o][r]) + bias;
        }
}

INLINE void NAME(few_rows)(const struct matrix *m, int form, int rows, int64_t from, int64_t to, const float *x, float *y) {
    for (; from + OUTPUTS <= to; from += OUTPUTS) NAME(outputs)(m, form, OUTPUTS, rows, from, x, y);
    for (; from < to; from++) NAME(outputs)(m, form, 1, rows, from, x, y);
}

/* Of LANES inputs from `k` on; x has just these of each row. */
INLINE void NAME(part_of_lanes)(const struct matrix *m, int form, int outputs, int rows, int64_t first, int64_t k,
                                const float *x, V total[][MOST_ROWS]) {
    V w[MOST_TILES];
    UNROLL for (int o = 0; o < outputs; o++) w[o] = NAME(weights)(m, (first + o) * m->in + k, form);
    UNROLL for (int r = 0; r < rows; r++) {
        V value = NAME(once)(NAME(load)(x + r * LANES));
        UNROLL for (int o = 0; o < outputs; o++) total[o][r] = NAME(fma)(w[o], value, total[o][r]);
    }
}

/* Onto `sums` [outputs][..][LANES] of `rows` rows: products of inputs `from` .. `to` - 1. x has just these, side by side. */
INLINE void NAME(part)(const struct matrix *m, int form, int outputs, int rows, int64_t first, int64_t from, int64_t to,
                       const float *x, float *sums, int64_t all, struct rows_ahead ahead) {
    V total[MOST_TILES][MOST_ROWS];
    UNROLL for (int o = 0; o < outputs; o++)
        UNROLL for (int r = 0; r < rows; r++)
            total[o][r] = from ? NAME(load)(sums + (o * all + r) * LANES) : NAME(zero)();
    int64_t k = from;
    for (; k + 2 * LANES <= to; k += 2 * LANES)
        UNROLL for (int half = 0; half < 2; half++, x += rows * LANES) {
            UNROLL for (int o = 0; o < outputs; o++)
                if (VALUE_BYTES(form) == 4 || !half)
                    __builtin_prefetch(ahead.codes + o * ahead.stride + (k - from + half * LANES) * VALUE_BYTES(form));
            NAME(part_of_lanes)(m, form, outputs, rows, first, k + half * LANES, x, total);
        }
    if (k < to) NAME(part_of_lanes)(m, form, outputs, rows, first, k, x, total);
    UNROLL for (int o = 0; o < outputs; o++)
        UNROLL for (int r = 0; r < rows; r++) NAME(store)(sums + (o * all + r) * LANES, total[o][r]);
}

/* The same for `count` outputs. `turns` calls, of which this is number `turn`, fetch what comes next, each a part of it. */
#define PARTS(form, rows, outputs)                                                                                    \
    static __attribute__((noinline)) void NAME(parts_##form##_##rows)(                                                \
        const struct matrix *m, int64_t first, int64_t count, int64_t from, int64_t to, const float *x, float *sums,  \
        int64_t all, struct rows_ahead ahead, int64_t turn, int64_t turns) {                                          \
        for (int64_t o = 0, next; o < count; o = next, turn = turn ? turn - 1 : turns - 1) {                          \
            next = o + outputs <= count ? o + outputs : o + 1;                                                        \
            const struct rows_ahead now = turn ? (struct rows_ahead){(const char *)x, 0}                              \
                                               : (struct rows_ahead){ahead.codes + o * ahead.stride, ahead.stride};   \
            float *into = sums + o * all * LANES;                                                                     \
            if (next == o + 1) NAME(part)(m, form, 1, rows, first + o, from, to, x, into, all, now);                  \
            else NAME(part)(m, form, outputs, rows, first + o, from, to, x, into, all, now);                          \
        }                                                                                                             \
    }
PARTS(0, 4, PANEL_OUTPUTS)
PARTS(1, 4, PANEL_OUTPUTS)
PARTS(2, 4, PANEL_OUTPUTS)
#if ROW_TILE >= 8
PARTS(0, 8, PANEL_OUTPUTS / 2)
PARTS(1, 8, PANEL_OUTPUTS / 2)
PARTS(2, 8, PANEL_OUTPUTS / 2)
static parts_work *const NAME(eight_rows)[] = {NAME(parts_0_8), NAME(parts_1_8), NAME(parts_2_8)};
#else
static parts_work *const NAME(eight_rows)[] = {NULL};
#endif
static parts_work *const NAME(four_rows)[] = {NAME(parts_0_4), NAME(parts_1_4), NAME(parts_2_4)};

/* Inputs `from` .. `to` - 1 of `rows` rows as [inputs / LANES][wanted][LANES]; rows behind the last are zero. */
INLINE void NAME(side_by_side)(const float *x, int64_t in, int64_t rows, int64_t wanted, int64_t from, int64_t to, float *into) {
    for (int64_t r = 0; r < wanted; r++)
        for (int64_t k = from; k < to; k += LANES)
            NAME(store)(into + (k - from) * wanted + r * LANES, r < rows ? NAME(load)(x + r * in + k) : NAME(zero)());
}

/* 3 .. TOGETHER rows. A part of the inputs is multiplied with all outputs and rows before the next one: so x comes from the
 * nearest cache, weights are read once, and come from memory while those before are multiplied with all rows. */
static void NAME(more_rows)(const struct matrix *m, int64_t from, int64_t to, const float *x, int64_t rows, float *y,
                            const struct matrix *next) {
    const int64_t in = m->in, size = VALUE_BYTES(m->form), all = (rows + 3) / 4 * 4;
    const int64_t width = all > TOGETHER / 2 ? GROUP / 2 : GROUP, pair = 2 * LANES;
    const int64_t longest = SIDE_VALUES / most(all, TOGETHER / 2) / pair * pair, parts = (in + longest - 1) / longest;
    const int64_t step = (in / parts + pair - 1) / pair * pair; /* parts of one length: each fetches the next */
    __attribute__((aligned(64))) float sums[GROUP * TOGETHER / 2 * LANES], side[SIDE_VALUES];
    int64_t take[TOGETHER / 4], turns = 0;
    for (int64_t done = 0; done < all; done += take[turns++]) take[turns] = ROW_TILE >= 8 && all - done >= 8 ? 8 : 4;
    for (int64_t first = from; first < to; first += width) {
        const int64_t last = first + width < to ? first + width : to;
        for (int64_t k = 0; k < in; k += step) {
            const int64_t end = k + step < in ? k + step : in;
            for (int64_t turn = 0, done = 0; turn < turns; done += take[turn++])
                NAME(side_by_side)(x + done * in, in, rows - done, take[turn], k, end, side + done * (end - k));
            for (int64_t panel = first; panel < last; panel += PANEL_ROWS) {
                const int64_t count = panel + PANEL_ROWS < last ? PANEL_ROWS : last - panel, behind = panel + last - first;
                struct rows_ahead ahead = {(const char *)m->codes + (panel * in + end) * size, in * size};
                if (end == in && behind < m->out) ahead.codes = (const char *)m->codes + behind * in * size;
                else if (end == in) ahead = (struct rows_ahead){next->codes, (int64_t)next->in * size};
                for (int64_t turn = 0, done = 0; turn < turns; done += take[turn++])
                    (take[turn] == 8 ? NAME(eight_rows) : NAME(four_rows))[m->form](
                        m, panel, count, k, end, side + done * (end - k), sums + ((panel - first) * all + done) * LANES, all,
                        ahead, turn, turns);
            }
        }
        for (int64_t o = first; o < last; o++)
            for (int64_t r = 0; r < rows; r++) {
                const float bias = m->bias ? m->bias[o] : 0.0f;
                y[r * m->out + o] = NAME(total)(NAME(load)(sums + ((o - first) * all + r) * LANES)) + bias;
            }
    }
}

static void NAME(row_major)(const struct matrix *m, int form, int64_t from, int64_t to, const float *x, int64_t rows, float *y,
                            const struct matrix *next) {
    for (; rows > 0; rows -= TOGETHER, x += TOGETHER * m->in, y += TOGETHER * (int64_t)m->out)
        if (rows == 1) NAME(few_rows)(m, form, 1, from, to, x, y);
        else if (rows == 2) NAME(few_rows)(m, form, 2, from, to, x, y);
        else NAME(more_rows)(m, from, to, x, rows < TOGETHER ? rows : TOGETHER, y, next);
}
#undef PARTS

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
    for (int64_t index = 0; index < count; index++) four |= FOUR_BITS(m[index]->form);
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
    float *of_blocks = (float *)(codes4 + rows * in);
    for (int64_t index = 0; index < count; index++)
        if (!BY_BYTES(m[index]) && HAS_OFFSETS(m[index]->form)) {
            NAME(block_sums)(m[index], values, rows, of_blocks);
            break;
        }
    return (struct rounded){values, scales, moved, of_blocks, sums, codes4, codes8};
}

/* --- products of any form --- */

/* Outputs GROUP piece .. GROUP (piece + 1) - 1, as far as there are outputs. `rounded`: x, where it is rounded. `next`: the
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
    case FORM_F32: NAME(row_major)(m, FORM_F32, from, to, x, rows, y, next); break;
    case FORM_BF16: NAME(row_major)(m, FORM_BF16, from, to, x, rows, y, next); break;
    case FORM_F16: NAME(row_major)(m, FORM_F16, from, to, x, rows, y, next); break;
    case FORM_F32_COLUMNS:
        for (int64_t r = 0; r < rows; r++) {
            int64_t first = from;
            for (; first + 4 * LANES <= to; first += 4 * LANES) NAME(columns)(m, 4, first, x + r * m->in, y + r * m->out);
            for (; first < to; first += LANES) NAME(columns)(m, 1, first, x + r * m->in, y + r * m->out);
        }
        break;
    default: {
        const struct choice *choices = FOUR_BITS(m->form) ? NAME(choices_4) : SIX_BITS(m->form) ? NAME(choices_6)
                                     : EIGHT_BITS(m->form) ? NAME(choices_8) : NAME(choices_5);
        NAME(tiled)(m, choices, tile, end, x, rows, y, sums, next);
    }
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
    if (m->rounds) {
        rounded = NAME(round_rows)(&m, 1, x, rows, scratch);
        job.sums = rounded.blocks;
    } else NAME(block_sums)(m, x, rows, scratch);
    do_pieces(threads, NAME(product_piece), &job, GROUPS(m));
}

static void NAME(unpack)(const struct matrix *m, int64_t first, int64_t last, float *panel) {
    const int64_t in = m->in, count = in / m->block, width = (last - first) * LANES;
    const int offset = HAS_OFFSETS(m->form);
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t number = 0; number < count; number++) {
            V add = NAME(zero)(), scale = NAME(scales)(m, m->form, tile, count, number, &add);
            for (int64_t k = number * m->block; k < (number + 1) * m->block; k++) {
                float *into = panel + k * width + (tile - first) * LANES;
                V code;
                if (EIGHT_BITS(m->form)) code = NAME(bytes)((const int8_t *)m->codes + (tile * in + k) * LANES);
                else if (SIX_BITS(m->form)) {
                    const uint32_t *codes = (const uint32_t *)m->codes + (tile * (in / 16) + k / 16) * 3 * LANES;
                    I low = NAME(words)(codes + k % 16 / 8 * LANES), high = NAME(words)(codes + 2 * LANES);
                    code = NAME(signed6)(low, (int)(k % 8), high, (int)(k % 16));
                } else {
                    I words = NAME(words)((const uint32_t *)m->codes + (tile * (in / 8) + k / 8) * LANES);
                    code = FOUR_BITS(m->form) ? NAME(signed4)(words, (int)(k % 8))
                                              : NAME(table4)(words, (int)(k % 8), NAME(table)(m->form));
                    if (FOUR_BITS(m->form) && offset) code = NAME(add)(code, NAME(set)(8.0f));
                }
                /* scale * code has few enough bits to be exact where an offset is added: one rounding in all */
                NAME(store)(into, offset ? NAME(fma)(scale, code, add) : NAME(mul)(scale, code));
            }
        }
}
