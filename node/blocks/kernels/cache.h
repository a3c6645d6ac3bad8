/* How keys and values are held between steps. */

/* How a key or value of `dim` values is held (CacheForm in cache.py): as float32; as bfloat16; or as `dim` bytes and behind
 * them a bfloat16 scale for each ROUND of these. What is held stands for values that are exact in float32. */
enum held { HELD_F32 = 0, HELD_BF16 = 1, HELD_INT8 = 2 };

/* float32 to the nearest bfloat16, ties to even; NaN stays NaN. */
INLINE uint16_t float_brain(float value) {
    uint32_t bits = float_bits(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* Bytes of a key or value. */
INLINE int64_t key_bytes(int32_t held, int64_t dim) {
    if (held == HELD_INT8) return dim + 2 * ((dim + ROUND - 1) / ROUND);
    return held == HELD_BF16 ? 2 * dim : 4 * dim;
}

/* Holds a key or value; `dim` is even. */
static void hold_key(int32_t held, const float *x, int64_t dim, uint8_t *into) {
    if (held == HELD_F32) memcpy(into, x, dim * sizeof(float));
    if (held == HELD_BF16)
        for (int64_t index = 0; index < dim; index++) {
            uint16_t brain = float_brain(x[index]);
            memcpy(into + 2 * index, &brain, 2);
        }
    for (int64_t first = 0; held == HELD_INT8 && first < dim; first += ROUND) {
        const int64_t end = first + ROUND < dim ? first + ROUND : dim;
        uint32_t largest = 0;
        for (int64_t index = first; index < end; index++) {
            uint32_t size = float_bits(x[index]) & 0x7fffffffu;
            largest = size > largest ? size : largest;
        }
        float scale = largest < 0x7f800000u && bits_float(largest) > 1e-30f ? bits_float(largest) / 127.0f : 0.0f;
        uint16_t up = (uint16_t)((float_bits(scale) + 0xffffu) >> 16);
        scale = bits_float((uint32_t)up << 16);
        for (int64_t index = first; index < end; index++) /* to even, by 1.5 * 2^23 */
            into[index] = (uint8_t)(int8_t)(int32_t)(scale > 0.0f ? x[index] / scale + 12582912.0f - 12582912.0f : 0.0f);
        if (largest >= 0x7f800000u) up = 0x7fc0u;
        memcpy(into + dim + 2 * (first / ROUND), &up, 2);
    }
}

/* Values of a row: of what queries and what is looked at take, of keys, of latents of all heads, and at most of what is multiplied. */
struct widths { int64_t wide, narrow, latents, most; };

INLINE struct widths widths_of(const struct shape *s) {
    const int64_t wide = most(s->heads * most(s->head_dim, s->value_dim), s->hidden);
    struct widths w = {most(wide, s->mixed), s->kv_heads * s->head_dim, s->heads * s->latent, 0};
    if (s->latent) w.narrow = s->latent + s->rotary_dim;
    w.most = most(most(s->inner, w.wide), s->low);
    return w;
}

/* float32 that each thread of a step has for itself: an opened panel, and `score_count`. */
INLINE int64_t own_count(const struct shape *s, int64_t score_count) {
    return score_count + (s->held == HELD_F32 ? 0 : PANEL * (s->latent ? s->latent + s->rotary_dim : s->head_dim));
}
