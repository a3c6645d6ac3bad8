/* Products of weights of 4 and 8 bits with rounded rows: compiled for each product of bytes, named BYTES, with the
 * vectors of ISA. Sums of a block are whole numbers; what follows them is a product and a sum of float32, rounded apart,
 * in an order that follows from the matrix alone: all instruction sets give the same bits.
 *
 * What BYTES offers: B, 4 bytes for each of 16 outputs; J, their sums. `low4` and `high4` of a word's 8 codes are inputs
 * 0, 2, 4, 6 and 1, 3, 5, 7 as 0 .. 15; `four8` are 4 inputs one behind the other, -128 .. 127. `whole4` and `whole8` are
 * the sums of up to ROUND inputs as float32; `of_x` is the sum of the row's own codes. */
#define B OWN(B)
#define J OWN(J)

INLINE int32_t OWN(four_codes)(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, 4);
    return four;
}

/* As `tile_product`, for rows `row` .. `row + rows - 1` of x. `bits`: 4 or 8. */
INLINE void OWN(byte_tile)(const struct matrix *m, int bits, int tiles, int rows, int64_t tile, const struct rounded *x,
                           int64_t row, float *y) {
    const int form = m->form, offset = HAS_OFFSETS(form), less = form == FORM_Q4_HALF; /* codes less 8 */
    const int64_t in = m->in, unit = m->block < ROUND ? m->block : ROUND; /* inputs that share both scales */
    const int64_t held = m->block / unit, blocks = in / m->block, words = bits == 8 ? in * LANES : in / 8 * LANES;
    const int8_t *xs = (bits == 8 ? x->codes8 : x->codes4) + row * in;
    const struct ahead ahead = ahead_of(m, tile + tiles, bits == 8 ? words : 4 * words, blocks, m);
    V total[MOST_TILES][MOST_ROWS];
    UNROLL for (int t = 0; t < tiles; t++)
        UNROLL for (int r = 0; r < rows; r++) total[t][r] = NAME(zero)();
    for (int64_t from = 0, block = 0, left = held; from < in; from += unit) {
        J part[MOST_TILES][MOST_ROWS];
        UNROLL for (int t = 0; t < tiles; t++)
            UNROLL for (int r = 0; r < rows; r++) part[t][r] = OWN(none)();
        if (bits == 8)
            for (int64_t k = from; k < from + unit; k += 4) {
                B w[MOST_TILES];
                UNROLL for (int t = 0; t < tiles; t++) {
                    const int8_t *codes = (const int8_t *)m->codes + (tile + t) * words + k * LANES;
                    w[t] = OWN(four8)(codes);
                    __builtin_prefetch(codes + tiles * words); /* for the tiles that come next */
                }
                UNROLL for (int r = 0; r < rows; r++) {
                    int32_t four = OWN(four_codes)(xs + r * in + k);
                    UNROLL for (int t = 0; t < tiles; t++) part[t][r] = OWN(dot8)(part[t][r], w[t], four);
                }
            }
        else
            for (int64_t k = from; k < from + unit; k += 8) {
                B low[MOST_TILES], high[MOST_TILES];
                UNROLL for (int t = 0; t < tiles; t++) {
                    const uint32_t *codes = (const uint32_t *)m->codes + (tile + t) * words + k / 8 * LANES;
                    I eight = NAME(words)(codes);
                    low[t] = OWN(low4)(eight);
                    high[t] = OWN(high4)(eight);
                    __builtin_prefetch(codes + tiles * words);
                }
                UNROLL for (int r = 0; r < rows; r++) {
                    int32_t even = OWN(four_codes)(xs + r * in + k), odd = OWN(four_codes)(xs + r * in + k + 4);
                    UNROLL for (int t = 0; t < tiles; t++)
                        part[t][r] = OWN(dot4)(OWN(dot4)(part[t][r], low[t], even), high[t], odd);
                }
            }
        const float *steps = x->scales + (row * in + from) / ROUND, *moved = x->moved + (row * in + from) / ROUND;
        const int32_t *sums = x->sums + (row * in + from) / 16;
        UNROLL for (int t = 0; t < tiles; t++) {
            if (left == held) fetch_scales(ahead, t * blocks + block, form, m->block);
            V add = NAME(zero)(), scale = NAME(scales)(m, form, tile + t, blocks, block, &add);
            if (less) add = NAME(mul)(scale, NAME(set)(-8.0f));
            UNROLL for (int r = 0; r < rows; r++) {
                const int32_t *own = sums + r * (in / 16);
                V sum = bits == 8 ? OWN(whole8)(part[t][r], unit > 16 ? own[0] + own[1] : own[0]) : OWN(whole4)(part[t][r]);
                V both = NAME(mul)(scale, NAME(set)(steps[r * (in / ROUND)]));
                total[t][r] = NAME(add)(total[t][r], NAME(mul)(both, sum));
                if (offset || less) total[t][r] = NAME(add)(total[t][r], NAME(mul)(add, NAME(set)(moved[r * (in / ROUND)])));
            }
        }
        if (!--left) block++, left = held;
    }
    UNROLL for (int t = 0; t < tiles; t++)
        UNROLL for (int r = 0; r < rows; r++) NAME(put)(m, tile + t, total[t][r], y + (row + r) * m->out);
}

#define TILES(bits, rows, tiles)                                                                                      \
    static __attribute__((noinline)) void OWN(bytes_many_##bits##_##rows)(const struct matrix *m, int64_t tile,             \
                                                                    const struct rounded *x, int64_t row, float *y) { \
        OWN(byte_tile)(m, bits, tiles, rows, tile, x, row, y);                                                        \
    }                                                                                                                 \
    static __attribute__((noinline)) void OWN(bytes_one_##bits##_##rows)(const struct matrix *m, int64_t tile,              \
                                                                   const struct rounded *x, int64_t row, float *y) {  \
        OWN(byte_tile)(m, bits, 1, rows, tile, x, row, y);                                                            \
    }
#define ALL_TILES(bits) TILES(bits, 1, TILES_ONE) TILES(bits, 2, TILES_MANY) TILES(bits, 4, 1)
#define CHOICE(bits, rows, tiles) {rows, tiles, OWN(bytes_many_##bits##_##rows), OWN(bytes_one_##bits##_##rows)}
#define CHOICES(bits) CHOICE(bits, 4, 1), CHOICE(bits, 2, TILES_MANY), CHOICE(bits, 1, TILES_ONE)
ALL_TILES(4)
ALL_TILES(8)
#if ROW_TILE >= 8
TILES(4, 8, 1)
TILES(8, 8, 1)
static const struct byte_choice OWN(choices)[2][4] = {{CHOICE(4, 8, 1), CHOICES(4)}, {CHOICE(8, 8, 1), CHOICES(8)}};
#else
static const struct byte_choice OWN(choices)[2][4] = {{CHOICES(4)}, {CHOICES(8)}};
#endif

/* Tiles `tile` .. `end` - 1 for all rows, a few of them at a time, while the tiles' weights stay in a near cache. */
static void OWN(multiply_bytes)(const struct matrix *m, int64_t tile, int64_t end, const struct rounded *x, int64_t rows,
                                float *y) {
    const struct byte_choice *choice = OWN(choices)[FOUR_BITS(m->form) ? 0 : 1];
    const int64_t from = tile;
    for (int64_t row = 0; row < rows; row += choice->rows) {
        while (choice->rows > rows - row) choice++; /* the largest first, rows of one at the end */
        for (tile = from; tile + choice->tiles <= end; tile += choice->tiles) choice->many(m, tile, x, row, y);
        for (; tile < end; tile++) choice->one(m, tile, x, row, y);
    }
}

static const struct kernels OWN(kernels) = {STRING(BYTES), NAME(multiply), NAME(unpack),  NAME(step),
                                            NAME(convolve), NAME(delta),  OWN(multiply_bytes)};

#undef TILES
#undef ALL_TILES
#undef CHOICES
#undef CHOICE
#undef BYTES
