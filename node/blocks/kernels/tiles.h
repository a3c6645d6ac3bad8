/* Products with packed weights, tiles of 16 outputs side by side: compiled for each instruction set. */

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

/* The codes of inputs `from` .. `to` - 1 of a tile as float32; `stride` float32 from those of an input to the next one's.
 * Meanwhile as many are fetched that come next. */
INLINE void NAME(open_codes)(const struct matrix *m, int64_t tile, int64_t from, int64_t to, int64_t stride, float *into) {
    const int64_t in = m->in, bits = EIGHT_BITS(m->form) ? 8 : SIX_BITS(m->form) ? 6 : 4, more = (to - from) * LANES * bits / 8;
    const float *table = NAME(table)(m->form);
    for (int64_t k = from; k < to; k += 16)
        UNROLL for (int eight = 0; eight < 2; eight++, into += 8 * stride) {
            const int64_t place = (tile * in + k + 8 * eight) * LANES * bits / 8;
            const char *codes = (const char *)m->codes + place;
            if (bits == 8) {
                UNROLL for (int j = 0; j < 8; j++) NAME(store)(into + j * stride, NAME(bytes)((const int8_t *)codes + j * LANES));
                __builtin_prefetch(codes + more + 64);
            } else if (bits == 6) { /* the high bits are behind all low ones */
                codes = (const char *)m->codes + (tile * in + k) * LANES * 6 / 8;
                const I low = NAME(words)((const uint32_t *)codes + eight * LANES), high = NAME(words)((const uint32_t *)codes + 2 * LANES);
                UNROLL for (int j = 0; j < 8; j++) NAME(store)(into + j * stride, NAME(signed6)(low, j, high, 8 * eight + j));
                codes += eight * 128;
            } else {
                const I words = NAME(words)((const uint32_t *)codes);
                if (FOUR_BITS(m->form)) {
                    UNROLL for (int j = 0; j < 8; j++) NAME(store)(into + j * stride, NAME(signed4)(words, j));
                } else {
                    UNROLL for (int j = 0; j < 8; j++) NAME(store)(into + j * stride, NAME(table4)(words, j, table));
                }
            }
            __builtin_prefetch(codes + more);
        }
}

/* As `tile_product`, for `rows` rows, 5 to 8, of codes of 4 bits. Registers hold the sums of four: these are multiplied with a block
 * that lies open, and half of the next one is opened meanwhile; its other half beside the other rows. So codes are opened once for all. */
INLINE void NAME(more_of_tile)(const struct matrix *m, int kind, int rows, int64_t tile, int64_t end, const float *x,
                               const float *sums, float *y, const struct matrix *next) {
    const int form = m->form, offset = HAS_OFFSETS(form);
    const int64_t in = m->in, block = m->block, count = in / block, tiles = (m->out + LANES - 1) / LANES;
    const float *table = NAME(table)(form);
    __attribute__((aligned(64))) float open[2][4 * LANES * LANES], total[MOST_ROWS][LANES];
    float *own = open[0], *other = open[1];
    NAME(open_codes)(m, tile, 0, block, LANES, own);
    for (; tile < end; tile++) {
        const struct ahead ahead = ahead_of(m, tile + 1, in / 8 * LANES * 4, count, next);
        memset(total, 0, sizeof total);
        for (int64_t number = 0; number < count; number++) {
            const int64_t last = tile + 1 == tiles && number + 1 == count; /* opens itself once more */
            const uint32_t *codes = (const uint32_t *)m->codes + (tile * in + (number + !last) * block) / 8 * LANES;
            const char *line = ahead.codes + number * block / 8 * LANES * 4;
            float *into = other;
            fetch_scales(ahead, number, form, block);
            V add = NAME(zero)(), scale = NAME(scales)(m, form, tile, count, number, &add);
            if (offset && kind == 4) add = NAME(fma)(scale, NAME(set)(8.0f), add); /* codes are held as code - 8 */
            UNROLL for (int half = 0; half < 2; half++) {
                const int four = half ? rows - 4 : 4;
                const float *w = own, *xs = x + 4 * half * in + number * block, *of = sums + (4 * half * in + number * block) / LANES;
                V part[4];
                UNROLL for (int r = 0; r < four; r++) part[r] = NAME(zero)();
                for (int64_t k = 0; k < block; k += 16, codes += LANES, line += 4 * LANES) {
                    const I eight = NAME(words)(codes);
                    __builtin_prefetch(line);
                    UNROLL for (int j = 0; j < 8; j++, into += LANES) {
                        NAME(store)(into, kind == 5 ? NAME(table4)(eight, j, table) : NAME(signed4)(eight, j));
                        UNROLL for (int two = 0; two < 2; two++, w += LANES) {
                            const V weight = NAME(load)(w);
                            UNROLL for (int r = 0; r < four; r++)
                                part[r] = NAME(fma)(weight, NAME(set)(xs[r * in + k + 2 * j + two]), part[r]);
                        }
                    }
                }
                UNROLL for (int r = 0; r < four; r++, of += in / LANES) {
                    float *at = total[4 * half + r];
                    V sum = NAME(fma)(scale, part[r], NAME(load)(at));
                    if (offset) sum = NAME(fma)(add, NAME(set)(block > LANES ? of[0] + of[1] : of[0]), sum);
                    NAME(store)(at, sum);
                }
            }
            float *const kept = own;
            own = other, other = kept;
        }
        UNROLL for (int r = 0; r < rows; r++) NAME(put)(m, tile, NAME(load)(total[r]), y + (int64_t)r * m->out);
    }
}

/* A function for each kind and size of tile: `rows` rows of x and as many tiles of the matrix as registers hold. */
#define FOR_TILES(name, call)                                                                                         \
    static __attribute__((noinline)) void name(const struct matrix *m, int64_t tile, const float *x, const float *sums, \
                                               float *y, const struct matrix *next) {                                 \
        call;                                                                                                         \
    }
#define TILES(kind, rows, tiles)                                                                                      \
    FOR_TILES(NAME(many_##kind##_##rows), NAME(tile_product)(m, kind, tiles, rows, tile, x, sums, y, next))           \
    FOR_TILES(NAME(one_##kind##_##rows), NAME(tile_product)(m, kind, 1, rows, tile, x, sums, y, next))
#define MORE(kind, rows)                                                                                              \
    FOR_TILES(NAME(many_##kind##_##rows), NAME(more_of_tile)(m, kind, rows, tile, tile + MOST_TILES, x, sums, y, next)) \
    FOR_TILES(NAME(one_##kind##_##rows), NAME(more_of_tile)(m, kind, rows, tile, tile + 1, x, sums, y, next))
#if ROW_TILE >= 8
#define ALL_TILES(kind) TILES(kind, 1, TILES_ONE) TILES(kind, 2, TILES_ONE) TILES(kind, 4, TILES_MANY) TILES(kind, 8, TILES_MANY)
#define CHOICES(kind)                                                                                                 \
    { CHOICE(kind, 8, TILES_MANY), CHOICE(kind, 4, TILES_MANY), CHOICE(kind, 2, TILES_ONE), CHOICE(kind, 1, TILES_ONE) }
#define FOUR_BIT_CHOICES(kind) CHOICES(kind)
#elif ROW_TILE >= 4
#define ALL_TILES(kind) TILES(kind, 1, TILES_ONE) TILES(kind, 2, TILES_ONE) TILES(kind, 4, TILES_MANY)
#define CHOICES(kind) { FEW_CHOICES(kind) }
#define FEW_CHOICES(kind) CHOICE(kind, 4, TILES_MANY), CHOICE(kind, 2, TILES_ONE), CHOICE(kind, 1, TILES_ONE)
#define MORE_CHOICE(kind, rows) CHOICE(kind, rows, MOST_TILES)
#define FOUR_BIT_CHOICES(kind)                                                                                        \
    { MORE_CHOICE(kind, 8), MORE_CHOICE(kind, 7), MORE_CHOICE(kind, 6), MORE_CHOICE(kind, 5), FEW_CHOICES(kind) }
#else
#define ALL_TILES(kind) TILES(kind, 1, TILES_ONE) TILES(kind, 2, TILES_ONE)
#define CHOICES(kind) { CHOICE(kind, 2, TILES_ONE), CHOICE(kind, 1, TILES_ONE) }
#define FOUR_BIT_CHOICES(kind) CHOICES(kind)
#endif
#define CHOICE(kind, rows, tiles) {rows, tiles, NAME(many_##kind##_##rows), NAME(one_##kind##_##rows)}
ALL_TILES(4)
ALL_TILES(5)
ALL_TILES(6)
ALL_TILES(8)
#if ROW_TILE == 4
MORE(4, 5) MORE(4, 6) MORE(4, 7) MORE(4, 8)
MORE(5, 5) MORE(5, 6) MORE(5, 7) MORE(5, 8)
#endif
static const struct choice NAME(choices_4)[] = FOUR_BIT_CHOICES(4), NAME(choices_5)[] = FOUR_BIT_CHOICES(5),
                           NAME(choices_6)[] = CHOICES(6), NAME(choices_8)[] = CHOICES(8);
#undef FOR_TILES
#undef TILES
#undef MORE
#undef ALL_TILES
#undef CHOICES
#undef FEW_CHOICES
#undef MORE_CHOICE
#undef FOUR_BIT_CHOICES
#undef CHOICE

/* For numbers of rows that are multiplied at a time: something of each, and functions by it. */
#undef EACH_COUNT
#undef COUNTED
#if MANY_ROWS > 6
#define EACH_COUNT(of) of(2) of(3) of(4) of(5) of(6) of(7) of(8)
#define COUNTED(name) NULL, NULL, NAME(name##_2), NAME(name##_3), NAME(name##_4), NAME(name##_5), NAME(name##_6), NAME(name##_7), NAME(name##_8)
#elif MANY_ROWS > 3
#define EACH_COUNT(of) of(2) of(3) of(4) of(5) of(6)
#define COUNTED(name) NULL, NULL, NAME(name##_2), NAME(name##_3), NAME(name##_4), NAME(name##_5), NAME(name##_6)
#else
#define EACH_COUNT(of) of(2) of(3)
#define COUNTED(name) NULL, NULL, NAME(name##_2), NAME(name##_3)
#endif

/* Inputs `from` .. `to` - 1 of `tiles` tiles: whole blocks, or a part of the one that is as long as a row. */
static __attribute__((noinline)) void NAME(open_panel)(const struct matrix *m, int64_t tile, int64_t tiles, int64_t from,
                                                       int64_t to, struct panel *panel) {
    const int64_t count = m->in / m->block;
    panel->tiles = tiles;
    panel->block = m->block < to - from ? m->block : to - from;
    panel->blocks = (to - from) / panel->block;
    panel->offset = HAS_OFFSETS(m->form);
    panel->goes_on = panel->block < m->block;
    panel->ends = !panel->goes_on || to == m->in;
    for (int64_t t = 0; t < tiles; t++) {
        NAME(open_codes)(m, tile + t, from, to, tiles * LANES, panel->codes + t * LANES);
        for (int64_t number = 0; number < panel->blocks; number++) {
            V add = NAME(zero)(), scale = NAME(scales)(m, m->form, tile + t, count, from / m->block + number, &add);
            if (panel->offset && FOUR_BITS(m->form)) add = NAME(fma)(scale, NAME(set)(8.0f), add); /* codes are held as code - 8 */
            NAME(store)(panel->scales + (number * tiles + t) * LANES, scale);
            NAME(store)(panel->offsets + (number * tiles + t) * LANES, add);
        }
    }
}

/* Onto `totals` [rows][tiles][LANES], what a panel gives with inputs of `rows` rows of x, which are `in` apart: their sum, or
 * of a block that goes on that of the products before they are scaled. `sums`: those of x, `block_sums`. */
INLINE void NAME(panel_product)(const struct panel *p, int tiles, int rows, const float *x, int64_t in, const float *sums,
                                float *totals) {
    const float *codes = p->codes;
    for (int64_t number = 0; number < p->blocks; number++) {
        const int64_t place = number * p->block, wide = p->block > LANES;
        V part[MOST_TILES][MOST_ROWS];
        UNROLL for (int t = 0; t < tiles; t++)
            UNROLL for (int r = 0; r < rows; r++) part[t][r] = NAME(zero)();
        if (p->goes_on) {
            UNROLL for (int t = 0; t < tiles; t++)
                UNROLL for (int r = 0; r < rows; r++) part[t][r] = NAME(load)(totals + (r * tiles + t) * LANES);
        }
        for (int64_t k = place; k < place + p->block; k++, codes += tiles * LANES) {
            V w[MOST_TILES];
            UNROLL for (int t = 0; t < tiles; t++) w[t] = NAME(load)(codes + t * LANES);
            UNROLL for (int r = 0; r < rows; r++) {
                const V value = NAME(once)(NAME(set)(x[r * in + k]));
                UNROLL for (int t = 0; t < tiles; t++) part[t][r] = NAME(fma)(w[t], value, part[t][r]);
            }
        }
        if (!p->ends) {
            UNROLL for (int t = 0; t < tiles; t++)
                UNROLL for (int r = 0; r < rows; r++) NAME(store)(totals + (r * tiles + t) * LANES, part[t][r]);
            return;
        }
        UNROLL for (int t = 0; t < tiles; t++) {
            const int64_t held = (number * tiles + t) * LANES;
            const V scale = NAME(load)(p->scales + held), add = NAME(load)(p->offsets + held);
            UNROLL for (int r = 0; r < rows; r++) {
                const float *of = sums + (r * in + place) / LANES;
                float *at = totals + (r * tiles + t) * LANES;
                V total = NAME(fma)(scale, part[t][r], p->goes_on ? NAME(zero)() : NAME(load)(at));
                if (p->offset) total = NAME(fma)(add, NAME(set)(wide ? of[0] + of[1] : of[0]), total);
                NAME(store)(at, total);
            }
        }
    }
}

#define PANEL_WORK(rows)                                                                                              \
    static __attribute__((noinline)) void NAME(panel_##rows)(const struct panel *p, const float *x, int64_t in,        \
                                                             const float *sums, float *totals) {                      \
        if (TILES_MANY == 1 || p->tiles == 1) NAME(panel_product)(p, 1, rows, x, in, sums, totals);                   \
        else NAME(panel_product)(p, TILES_MANY, rows, x, in, sums, totals);                                           \
    }
EACH_COUNT(PANEL_WORK)
static panel_work *const NAME(panel_work)[] = {COUNTED(panel)};
#undef PANEL_WORK

/* What the offsets of a matrix are multiplied with: sums of 16 inputs each, of which a block has one or two. */
static void NAME(block_sums)(const float *x, int64_t count, float *sums) {
    for (int64_t place = 0; place < count; place += LANES) *sums++ = NAME(total)(NAME(load)(x + place));
}

/* Tiles `tile` .. `end` - 1 for OPENED_FROM .. TOGETHER_OPENED rows: their codes are opened, a panel after the other, and stay in the
 * nearest cache for all rows. */
static void NAME(opened)(const struct matrix *m, int64_t tile, int64_t end, const float *x, int64_t rows, float *y,
                         const float *sums) {
    const int64_t in = m->in, unit = m->block > 4 * LANES ? LANES : m->block, groups = (rows + MANY_ROWS - 1) / MANY_ROWS;
    __attribute__((aligned(64))) float totals[TOGETHER_OPENED * TILES_MANY * LANES];
    struct panel panel;
    for (int64_t tiles; tile < end; tile += tiles) {
        tiles = end - tile < TILES_MANY ? 1 : TILES_MANY;
        memset(totals, 0, rows * tiles * LANES * sizeof(float));
        const int64_t longest = PANEL_VALUES / (tiles * LANES) / unit * unit, panels = (in + longest - 1) / longest;
        const int64_t step = (in / unit + panels - 1) / panels * unit; /* panels of about one length */
        for (int64_t from = 0, to; from < in; from = to) {
            to = from + step < in ? from + step : in;
            NAME(open_panel)(m, tile, tiles, from, to, &panel);
            for (int64_t done = 0, take, left = groups; left; done += take, left--) {
                take = (rows - done + left - 1) / left;
                NAME(panel_work)[take](&panel, x + done * in + from, in, sums + (done * in + from) / LANES,
                                       totals + done * tiles * LANES);
            }
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t t = 0; t < tiles; t++)
                NAME(put)(m, tile + t, NAME(load)(totals + (r * tiles + t) * LANES), y + r * m->out);
    }
}

/* Tiles `tile` .. `end` - 1. A few rows are taken at a time, while the tiles' weights stay in a near cache. */
static void NAME(tiled)(const struct matrix *m, int64_t tile, int64_t end, const float *x, int64_t rows, float *y,
                        const float *sums, const struct matrix *next) {
    const struct choice *choice = FOUR_BITS(m->form) ? NAME(choices_4) : SIX_BITS(m->form) ? NAME(choices_6)
                                : EIGHT_BITS(m->form) ? NAME(choices_8) : NAME(choices_5);
    for (int64_t take; rows; rows -= take, x += take * m->in, sums += take * m->in / LANES, y += take * (int64_t)m->out) {
        take = rows < TOGETHER_OPENED ? rows : TOGETHER_OPENED;
        if (take >= OPENED_FROM) {
            NAME(opened)(m, tile, end, x, take, y, sums);
            continue;
        }
        while (choice->rows > rows) choice++; /* the largest first, rows of one at the end */
        take = choice->rows;
        int64_t at = tile;
        for (; at + choice->tiles <= end; at += choice->tiles) choice->many(m, at, x, sums, y, next);
        for (; at < end; at++) choice->one(m, at, x, sums, y, next);
    }
}
