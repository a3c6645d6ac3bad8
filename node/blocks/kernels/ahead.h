/* Bytes of the scales of SUPER inputs of a tile whose scales have scales, and of the scales of a whole tile. */
INLINE int64_t super_bytes(int form, int64_t block) {
    const int64_t held = (int64_t)1 << SUPER_SHIFT(block);
    return HAS_OFFSETS(form) ? (4 + 2 * held) * LANES : (2 + held) * LANES;
}

INLINE int64_t tile_scales(int form, int64_t block, int64_t count) {
    if (SUPER_SCALES(form)) return (count >> SUPER_SHIFT(block)) * super_bytes(form, block);
    return count * LANES * (HALF_SCALES(form) ? 2 : 4);
}

/* What is fetched from memory while something else is multiplied. */
struct ahead {
    const char *codes, *scales, *offsets;
};

/* Tiles of `m` from `tile` on, of `bytes` of codes and `count` blocks each; behind the last one, those of `next`. */
INLINE struct ahead ahead_of(const struct matrix *m, int64_t tile, int64_t bytes, int64_t count, const struct matrix *next) {
    if (tile * LANES >= m->out) return (struct ahead){next->codes, next->scales, next->offsets};
    const int64_t scales = tile * tile_scales(m->form, m->block, count);
    return (struct ahead){(const char *)m->codes + tile * bytes, (const char *)m->scales + scales,
                          (const char *)m->offsets + scales};
}

/* The same of row-major weights: `stride` bytes from the row of an output to the next one, `lines` of 64 bytes of each. */
struct rows_ahead {
    const char *codes;
    int64_t stride, lines;
};

typedef void turned_work(const float *panel, int64_t count, int64_t tiles, const float *x, int begins, float *sums);

typedef void parts_work(const struct matrix *, int64_t first, int64_t count, int64_t from, int64_t to, const float *x,
                        float *sums, int64_t all, struct rows_ahead ahead, int64_t turn, int64_t turns, float *y, int64_t given);

/* Those of a block; of float16, those of two share a line of the processor's caches. */
INLINE void fetch_scales(struct ahead ahead, int64_t block, int form, int64_t size) {
    const int half = HALF_SCALES(form);
    if (half && block % 2) return;
    if (SUPER_SCALES(form)) {
        __builtin_prefetch(ahead.scales + (block * super_bytes(form, size) >> SUPER_SHIFT(size)));
        return;
    }
    const int64_t place = block * LANES * (half ? 2 : 4);
    __builtin_prefetch(ahead.scales + place);
    if (HAS_OFFSETS(form)) __builtin_prefetch(ahead.offsets + place);
}
