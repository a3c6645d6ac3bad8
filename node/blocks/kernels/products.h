/* Products of matrices with a few rows: compiled for each instruction set. */
/* `total` values added up in lanes, then the lanes. */
INLINE float NAME(dot)(const float *x, const float *y, int64_t count) {
    V sum = NAME(zero)();
    for (int64_t index = 0; index < count; index += LANES)
        sum = NAME(fma)(NAME(load)(x + index), NAME(load)(y + index), sum);
    return NAME(total)(sum);
}

#include "tiles.h"

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

/* Products of inputs `from` .. `to` - 1, onto `sums` [outputs][..][LANES] of `rows` rows; behind the last input, their totals
 * as outputs of the first `given` ones, from the registers. x has just these inputs, side by side. */
INLINE void NAME(part)(const struct matrix *m, int form, int outputs, int rows, int64_t first, int64_t from, int64_t to,
                       const float *x, float *sums, int64_t all, struct rows_ahead ahead, float *y, int64_t given) {
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
    if (to < m->in) {
        UNROLL for (int o = 0; o < outputs; o++)
            UNROLL for (int r = 0; r < rows; r++) NAME(store)(sums + (o * all + r) * LANES, total[o][r]);
        return;
    }
    UNROLL for (int o = 0; o < outputs; o++) {
        const float bias = m->bias ? m->bias[first + o] : 0.0f;
        UNROLL for (int r = 0; r < rows; r++)
            if (r < given) y[r * (int64_t)m->out + first + o] = NAME(total)(total[o][r]) + bias;
    }
}

/* The same for `count` outputs. `turns` calls, of which this is number `turn`, fetch what comes next, each a part of it. */
#define PARTS(form, rows, outputs)                                                                                    \
    static __attribute__((noinline)) void NAME(parts_##form##_##rows)(                                                \
        const struct matrix *m, int64_t first, int64_t count, int64_t from, int64_t to, const float *x, float *sums,  \
        int64_t all, struct rows_ahead ahead, int64_t turn, int64_t turns, float *y, int64_t given) {                 \
        for (int64_t o = 0, next; o < count; o = next, turn = turn ? turn - 1 : turns - 1) {                          \
            next = o + outputs <= count ? o + outputs : o + 1;                                                        \
            const struct rows_ahead now = turn ? (struct rows_ahead){(const char *)x, 0, 0}                           \
                                               : (struct rows_ahead){ahead.codes + o * ahead.stride, ahead.stride, 0};\
            float *into = sums + o * all * LANES;                                                                     \
            if (next == o + 1) NAME(part)(m, form, 1, rows, first + o, from, to, x, into, all, now, y, given);        \
            else NAME(part)(m, form, outputs, rows, first + o, from, to, x, into, all, now, y, given);                \
        }                                                                                                             \
    }
PARTS(0, 4, PANEL_OUTPUTS)
PARTS(1, 4, PANEL_OUTPUTS)
PARTS(2, 4, PANEL_OUTPUTS)
static parts_work *const NAME(four_rows)[] = {NAME(parts_0_4), NAME(parts_1_4), NAME(parts_2_4)};
#if MANY_ROWS > 6
PARTS(0, 8, PANEL_OUTPUTS / 2)
PARTS(1, 8, PANEL_OUTPUTS / 2)
PARTS(2, 8, PANEL_OUTPUTS / 2)
static parts_work *const NAME(many_rows)[] = {NAME(parts_0_8), NAME(parts_1_8), NAME(parts_2_8)};
#elif MANY_ROWS > 4
PARTS(0, 6, PANEL_OUTPUTS)
PARTS(1, 6, PANEL_OUTPUTS)
PARTS(2, 6, PANEL_OUTPUTS)
static parts_work *const NAME(many_rows)[] = {NAME(parts_0_6), NAME(parts_1_6), NAME(parts_2_6)};
#else
static parts_work *const NAME(many_rows)[] = {NULL};
#endif

/* Inputs `from` .. `to` - 1 of `rows` rows as [inputs / LANES][wanted][LANES]; rows behind the last are zero. */
INLINE void NAME(side_by_side)(const float *x, int64_t in, int64_t rows, int64_t wanted, int64_t from, int64_t to, float *into) {
    for (int64_t r = 0; r < wanted; r++)
        for (int64_t k = from; k < to; k += LANES)
            NAME(store)(into + (k - from) * wanted + r * LANES, r < rows ? NAME(load)(x + r * in + k) : NAME(zero)());
}

/* GROUP outputs at most, and 3 .. TOGETHER rows. A part of the inputs is multiplied with all of them before the next one: so x comes from the
 * nearest cache, weights are read once, and come from memory while those before are multiplied with all rows. */
static void NAME(more_rows)(const struct matrix *m, int64_t from, int64_t to, const float *x, int64_t rows, float *y,
                            const struct matrix *next) {
    const int64_t in = m->in, size = VALUE_BYTES(m->form), all = (rows + 3) / 4 * 4;
    const int64_t pair = 2 * LANES, parts = (in + SIDE_INPUTS - 1) / SIDE_INPUTS;
    const int64_t step = (in / parts + pair - 1) / pair * pair; /* parts of one length: each fetches the next */
    __attribute__((aligned(64))) float sums[GROUP * TOGETHER * LANES], side[TOGETHER * SIDE_INPUTS];
    int64_t take[TOGETHER / 4], turns = 0;
    for (int64_t left = all; left; left -= take[turns++]) /* two are never left */
        take[turns] = MANY_ROWS > 4 && left >= MANY_ROWS && left != MANY_ROWS + 2 ? MANY_ROWS : 4;
    for (int64_t k = 0; k < in; k += step) {
        const int64_t end = k + step < in ? k + step : in;
        for (int64_t turn = 0, done = 0; turn < turns; done += take[turn++])
            NAME(side_by_side)(x + done * in, in, rows - done, take[turn], k, end, side + done * (end - k));
        for (int64_t panel = from; panel < to; panel += PANEL_ROWS) {
            const int64_t count = panel + PANEL_ROWS < to ? PANEL_ROWS : to - panel, behind = panel + to - from;
            struct rows_ahead ahead = {(const char *)m->codes + (panel * in + end) * size, in * size, 0};
            if (end == in && behind < m->out) ahead.codes = (const char *)m->codes + behind * in * size;
            else if (end == in) ahead = (struct rows_ahead){next->codes, (int64_t)next->in * size, 0};
            for (int64_t turn = 0, done = 0; turn < turns; done += take[turn++])
                (take[turn] == 4 ? NAME(four_rows) : NAME(many_rows))[m->form](
                    m, panel, count, k, end, side + done * (end - k), sums + ((panel - from) * all + done) * LANES, all,
                    ahead, turn, turns, y + done * m->out, rows - done);
        }
    }
}

/* --- the same for many rows: weights are turned, a panel after the other, so that lanes run along the outputs --- */

/* Inputs `from` .. `to` - 1 of `tiles` tiles from output `first` on, into `panel`, whose inputs are ordered by the lane of a sum
 * that they belong to: [LANES] times [(to - from) / LANES][tiles][LANES], and a vector between, without which all would share
 * a few lines of the nearest cache. Behind the last output stands the last one. */
INLINE void NAME(turn_panel)(const struct matrix *m, int form, int64_t first, int64_t tiles, int64_t from, int64_t to, float *panel) {
    const int64_t wide = tiles * LANES, pitch = (to - from) * tiles + LANES;
    for (int64_t k = from; k < to; k += LANES, panel += wide)
        for (int64_t o = 0; o < wide; o += 4) {
            float opened[4][LANES];
            const float *row[4];
            UNROLL for (int j = 0; j < 4; j++) {
                const int64_t place = (first + o + j < m->out ? first + o + j : m->out - 1) * m->in + k;
                row[j] = form == FORM_F32 ? (const float *)m->codes + place : opened[j];
                if (form != FORM_F32) NAME(store)(opened[j], NAME(weights)(m, place, form));
            }
            for (int64_t lane = 0; lane < LANES; lane += 4) turn_four(row, lane, panel + lane * pitch + o, pitch);
        }
}

/* How many of the inputs are turned at a time: panels of about one length. */
INLINE int64_t NAME(turned_step)(int64_t in) {
    const int64_t parts = (in * TILES_MANY * LANES + TURNED_VALUES - 1) / TURNED_VALUES;
    return (in / LANES + parts - 1) / parts * LANES;
}

/* Rows, `in` apart, for these products, for each panel [LANES][groups of rows][inputs of a lane][rows of the group]: all that a lane
 * of the sums takes stands side by side. */
static void NAME(turn_rows)(const float *x, int64_t in, int64_t rows, float *into) {
    const int64_t step = NAME(turned_step)(in), groups = (rows + MANY_ROWS - 1) / MANY_ROWS;
    for (int64_t first = 0; first < in; first += step) {
        const int64_t count = (first + step < in ? step : in - first) / LANES;
        for (int64_t done = 0, take, left = groups; left; done += take, left--) {
            take = (rows - done + left - 1) / left;
            for (int64_t from = 0; from < count; from += LANES) /* a few lines of each row at a time */
                for (int64_t lane = 0; lane < LANES; lane++)
                    for (int64_t k = from; k < count && k < from + LANES; k++)
                        for (int64_t r = 0; r < take; r++)
                            into[first * rows + (lane * rows + done) * count + k * take + r] = x[(done + r) * in + first + k * LANES + lane];
        }
    }
}

/* What `count` values of a lane of a panel give with those of `rows` rows, x [count][rows], onto `sums` [rows][tiles][LANES]. */
INLINE void NAME(turned_product)(const float *panel, int64_t count, int tiles, int rows, const float *x, int begins, float *sums) {
    V part[MOST_TILES][MOST_ROWS];
    UNROLL for (int t = 0; t < tiles; t++)
        UNROLL for (int r = 0; r < rows; r++) part[t][r] = begins ? NAME(zero)() : NAME(load)(sums + (r * tiles + t) * LANES);
    for (int64_t k = 0; k < count; k++, panel += tiles * LANES, x += rows) {
        V w[MOST_TILES];
        UNROLL for (int t = 0; t < tiles; t++) w[t] = NAME(load)(panel + t * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            const V value = NAME(once)(NAME(set)(x[r]));
            UNROLL for (int t = 0; t < tiles; t++) part[t][r] = NAME(fma)(w[t], value, part[t][r]);
        }
    }
    UNROLL for (int t = 0; t < tiles; t++)
        UNROLL for (int r = 0; r < rows; r++) NAME(store)(sums + (r * tiles + t) * LANES, part[t][r]);
}

/* Lanes `lane`, + 4, + 8 and + 12 of the sums of a row and tile, which are `pitch` apart, as `total` adds them. */
INLINE V NAME(four_lanes)(const float *sums, int64_t pitch, int lane) {
    const float *own = sums + lane * pitch;
    return NAME(add)(NAME(add)(NAME(load)(own), NAME(load)(own + 8 * pitch)),
                     NAME(add)(NAME(load)(own + 4 * pitch), NAME(load)(own + 12 * pitch)));
}

#define TURNED_WORK(rows)                                                                                             \
    static __attribute__((noinline)) void NAME(turned_##rows)(                                                        \
        const float *panel, int64_t count, int64_t tiles, const float *x, int begins, float *sums) {                  \
        if (TILES_MANY == 1 || tiles == 1) NAME(turned_product)(panel, count, 1, rows, x, begins, sums);              \
        else NAME(turned_product)(panel, count, TILES_MANY, rows, x, begins, sums);                                   \
    }
EACH_COUNT(TURNED_WORK)
static turned_work *const NAME(turned_work)[] = {COUNTED(turned)};
#undef TURNED_WORK

/* Outputs `from` .. `to` - 1 for up to TURNED / TILES_MANY rows, as `turn_rows` has them. Meanwhile what is turned next is fetched. */
INLINE void NAME(turned)(const struct matrix *m, int form, int64_t from, int64_t to, const float *x, int64_t rows, float *y,
                         const struct matrix *next) {
    const int64_t in = m->in, size = VALUE_BYTES(form), step = NAME(turned_step)(in), groups = (rows + MANY_ROWS - 1) / MANY_ROWS;
    __attribute__((aligned(64))) float sums[TURNED * LANES * LANES], panel[TURNED_VALUES + LANES * LANES];
    for (int64_t tiles; from < to; from += tiles * LANES) {
        tiles = to - from < TILES_MANY * LANES ? 1 : TILES_MANY;
        const int64_t wide = tiles * LANES;
        for (int64_t k = 0, end; k < in; k = end) {
            end = k + step < in ? k + step : in;
            const int64_t count = (end - k) / LANES;
            struct rows_ahead ahead = {(const char *)m->codes + (from * in + end) * size, in * size, step * size / 64};
            if (end == in && from + wide < m->out) ahead.codes += (wide - 1) * in * size;
            else if (end == in) ahead = (struct rows_ahead){next->codes, (int64_t)next->in * size, step * size / 64};
            NAME(turn_panel)(m, form, from, tiles, k, end, panel);
            for (int64_t lane = 0; lane < LANES; lane++)
                for (int64_t done = 0, take, left = groups; left; done += take) {
                    take = (rows - done + left - 1) / left;
                    for (int64_t line = --left; line < ahead.lines; line += groups)
                        for (int64_t t = lane; t < wide; t += LANES) __builtin_prefetch(ahead.codes + t * ahead.stride + 64 * line);
                    NAME(turned_work)[take](panel + lane * (count * wide + LANES), count, tiles,
                                            x + k * rows + (lane * rows + done) * count, k == 0, sums + (lane * rows + done) * wide);
                }
        }
        for (int64_t place = 0; place < rows * tiles; place++) {
            const float *at = sums + place * LANES;
            const V even = NAME(add)(NAME(four_lanes)(at, rows * wide, 0), NAME(four_lanes)(at, rows * wide, 2));
            const V odd = NAME(add)(NAME(four_lanes)(at, rows * wide, 1), NAME(four_lanes)(at, rows * wide, 3));
            NAME(put)(m, from / LANES + place % tiles, NAME(add)(even, odd), y + place / tiles * m->out);
        }
    }
}

/* `turned`: x as `turn_rows` has it, TURNED / TILES_MANY rows at a time as long as there are more than TOGETHER, or NULL. */
static void NAME(row_major)(const struct matrix *m, int form, int64_t from, int64_t to, const float *x, const float *turned,
                            int64_t rows, float *y, const struct matrix *next) {
    for (int64_t take, done = 0; done < rows; done += take, y += take * (int64_t)m->out) {
        const int64_t left = rows - done, most = left > TOGETHER && turned ? TURNED / TILES_MANY : TOGETHER;
        const float *own = x + done * m->in;
        take = left < most ? left : most;
        if (most > TOGETHER) NAME(turned)(m, form, from, to, turned + done * m->in, take, y, next);
        else if (take > 2) NAME(more_rows)(m, from, to, own, take, y, next);
        else if (take == 2) NAME(few_rows)(m, form, 2, from, to, own, y);
        else NAME(few_rows)(m, form, 1, from, to, own, y);
    }
}
#undef PARTS

/* --- products with float32 weights whose columns stand one behind the other (Conv1D): lanes run along the outputs --- */

INLINE void NAME(columns)(const struct matrix *m, int form, int vectors, int64_t first, const float *x, float *y) {
    V total[4];
    UNROLL for (int v = 0; v < vectors; v++) total[v] = NAME(zero)();
    for (int64_t k = 0; k < m->in; k++) {
        V value = NAME(set)(x[k]);
        UNROLL for (int v = 0; v < vectors; v++)
            total[v] = NAME(fma)(NAME(weights)(m, k * m->block + first + v * LANES, form), value, total[v]);
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

/* What products of `count` matrices with rows of x take beside it, into `sums`: `block_sums`, and behind their rows * in / LANES
 * values, if these are many rows of row-major weights, `turn_rows`. */
static void NAME(prepare)(const struct matrix *const *m, int64_t count, const float *x, int64_t rows, float *sums) {
    int offsets = 0, turned = 0;
    for (int64_t index = 0; index < count; index++) {
        offsets |= HAS_OFFSETS(m[index]->form) && !(m[index]->rounds && BY_BYTES(m[index]));
        turned |= sums && rows > TOGETHER && m[index]->form <= FORM_F16;
    }
    const int64_t in = m[0]->in, most = TURNED / TILES_MANY;
    if (offsets) NAME(block_sums)(x, rows * in, sums);
    for (int64_t done = 0; turned && rows - done > TOGETHER; done += most)
        NAME(turn_rows)(x + done * in, in, rows - done < most ? rows - done : most, sums + rows * in / LANES + done * in);
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
    NAME(prepare)(m, count, values, rows, of_blocks);
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
    const float *turned = sums ? sums + rows * m->in / LANES : NULL;
    switch (m->form) {
    case FORM_F32: NAME(row_major)(m, FORM_F32, from, to, x, turned, rows, y, next); break;
    case FORM_BF16: NAME(row_major)(m, FORM_BF16, from, to, x, turned, rows, y, next); break;
    case FORM_F16: NAME(row_major)(m, FORM_F16, from, to, x, turned, rows, y, next); break;
    case FORM_F32_COLUMNS:
        for (int64_t r = 0; r < rows; r++) {
            int64_t first = from;
            for (; first + 4 * LANES <= to; first += 4 * LANES) NAME(columns)(m, FORM_F32, 4, first, x + r * m->in, y + r * m->out);
            for (; first < to; first += LANES) NAME(columns)(m, FORM_F32, 1, first, x + r * m->in, y + r * m->out);
        }
        break;
    default: NAME(tiled)(m, tile, end, x, rows, y, sums, next);
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
    } else NAME(prepare)(&m, 1, x, rows, scratch);
    do_pieces(threads, NAME(product_piece), &job, GROUPS(m));
}

/* What inputs `from` .. `to` - 1 of a tile, all of one block, are multiplied with: float32 [to - from][LANES], `width` apart. */
INLINE void NAME(open_weights)(const struct matrix *m, int64_t tile, int64_t from, int64_t to, int64_t width, float *into) {
    const int offset = HAS_OFFSETS(m->form);
    const V more = NAME(set)(FOUR_BITS(m->form) && offset ? 8.0f : 0.0f); /* codes are held as code - 8 */
    V add = NAME(zero)(), scale = NAME(scales)(m, m->form, tile, m->in / m->block, from / m->block, &add);
    NAME(open_codes)(m, tile, from, to, width, into);
    /* scale * code has few enough bits to be exact where an offset is added: one rounding in all */
    for (int64_t k = from; k < to; k++, into += width) {
        const V code = NAME(load)(into);
        NAME(store)(into, offset ? NAME(fma)(scale, NAME(add)(code, more), add) : NAME(mul)(scale, code));
    }
}

static void NAME(unpack)(const struct matrix *m, int64_t first, int64_t last, float *panel) {
    const int64_t width = (last - first) * LANES;
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t from = 0; from < m->in; from += m->block)
            NAME(open_weights)(m, tile, from, from + m->block, width, panel + from * width + (tile - first) * LANES);
}
