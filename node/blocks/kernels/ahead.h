/* What is fetched from memory while something else is multiplied. */
struct ahead {
    const char *codes, *scales, *offsets;
};

/* Tiles of `m` from `tile` on, of `bytes` of codes and `count` blocks each; behind the last one, those of `next`. */
INLINE struct ahead ahead_of(const struct matrix *m, int64_t tile, int64_t bytes, int64_t count, const struct matrix *next) {
    if (tile * LANES >= m->out) return (struct ahead){next->codes, next->scales, next->offsets};
    const int64_t scales = tile * count * LANES * (HALF_SCALES(m->form) ? 2 : 4);
    return (struct ahead){(const char *)m->codes + tile * bytes, (const char *)m->scales + scales,
                          (const char *)m->offsets + scales};
}

/* The same of row-major weights: `stride` bytes from the row of an output to the next one. */
struct rows_ahead {
    const char *codes;
    int64_t stride;
};

typedef void parts_work(const struct matrix *, int64_t first, int64_t count, int64_t from, int64_t to, const float *x,
                        float *sums, int64_t all, struct rows_ahead ahead, int64_t turn, int64_t turns);

/* Those of a block; of float16, those of two share a line of the processor's caches. */
INLINE void fetch_scales(struct ahead ahead, int64_t block, int half, int offset) {
    if (half && block % 2) return;
    const int64_t place = block * LANES * (half ? 2 : 4);
    __builtin_prefetch(ahead.scales + place);
    if (offset) __builtin_prefetch(ahead.offsets + place);
}
