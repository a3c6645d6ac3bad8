/* Vectors of four, which every compiler has on every processor; gcc does not make them of loops over arrays. Included twice:
 * with FUSED products and sums are rounded once, as the instructions of other processors do it, which takes ten times as long. */
typedef struct { four_floats v[4]; } V;
typedef struct { four_words v[4]; } I;
INLINE V NAME(set)(float x) { V r; FOUR r.v[part] = (four_floats){x, x, x, x}; return r; }
INLINE V NAME(zero)(void) { return NAME(set)(0); }
INLINE V NAME(load)(const float *p) { V r; memcpy(r.v, p, sizeof r.v); return r; }
INLINE V NAME(once)(V a) { return a; }
INLINE void NAME(store)(float *p, V a) { memcpy(p, a.v, sizeof a.v); }
INLINE V NAME(mul)(V a, V b) { FOUR a.v[part] *= b.v[part]; return a; }
INLINE V NAME(add)(V a, V b) { FOUR a.v[part] += b.v[part]; return a; }
#if FUSED
static __attribute__((noinline)) void NAME(fuse)(const float *a, const float *b, float *c) {
    EACH c[lane] = fused_one(a[lane], b[lane], c[lane]);
}
INLINE V NAME(fma)(V a, V b, V c) {
    NAME(fuse)((const float *)a.v, (const float *)b.v, (float *)c.v);
    return c;
}
#else
INLINE V NAME(fma)(V a, V b, V c) { FOUR c.v[part] += a.v[part] * b.v[part]; return c; }
#endif
INLINE V NAME(half)(const uint16_t *p) { float r[LANES]; EACH r[lane] = half_float(p[lane]); return NAME(load)(r); }
INLINE V NAME(brain)(const uint16_t *p) {
    V r;
    FOUR {
        const uint16_t *q = p + 4 * part;
        r.v[part] = (four_floats)((four_words){q[0], q[1], q[2], q[3]} << 16);
    }
    return r;
}
/* Each byte becomes the highest one of a word, which is shifted down. */
INLINE V NAME(bytes)(const int8_t *p) {
    sixteen_bytes all, zero = {0};
    memcpy(&all, p, sizeof all);
    const eight_shorts low = (eight_shorts)SHUFFLE(sixteen_bytes, zero, all, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const eight_shorts high = (eight_shorts)SHUFFLE(sixteen_bytes, zero, all, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    const eight_shorts none = {0};
    V r = {{AS_FLOATS((four_ints)SHUFFLE(eight_shorts, none, low, 0, 8, 1, 9, 2, 10, 3, 11) >> 24),
            AS_FLOATS((four_ints)SHUFFLE(eight_shorts, none, low, 4, 12, 5, 13, 6, 14, 7, 15) >> 24),
            AS_FLOATS((four_ints)SHUFFLE(eight_shorts, none, high, 0, 8, 1, 9, 2, 10, 3, 11) >> 24),
            AS_FLOATS((four_ints)SHUFFLE(eight_shorts, none, high, 4, 12, 5, 13, 6, 14, 7, 15) >> 24)}};
    return r;
}
INLINE I NAME(words)(const uint32_t *p) { I r; memcpy(r.v, p, sizeof r.v); return r; }
INLINE V NAME(signed4)(I w, int j) {
    V r; FOUR r.v[part] = AS_FLOATS((four_ints)(w.v[part] << (28 - 4 * j)) >> 28); return r;
}
INLINE V NAME(table4)(I w, int j, const float *table) {
    float r[LANES]; EACH r[lane] = table[w.v[lane / 4][lane % 4] >> (4 * j) & 15u]; return NAME(load)(r);
}
INLINE V NAME(signed6)(I low, int j, I high, int k) {
    V r;
    FOUR r.v[part] = AS_FLOATS((four_ints)((low.v[part] >> (4 * j) & 15u) | (high.v[part] >> (2 * k) & 3u) << 4) - 32);
    return r;
}
INLINE float NAME(total)(V a) {
    four_floats four = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
INLINE void NAME(totals)(const V *v, float scale, float *into) {
    for (int k = 0; k < 4; k++) into[k] = NAME(total)(v[k]) * scale;
}
#define TILES_ONE 1
#define TILES_MANY 1
#define ROW_TILE 2
#define MANY_ROWS 3
#define OUTPUTS 2
#define PANEL_OUTPUTS 2
#include "products.h"
#include "step.h"

#define BYTES ISA
typedef struct { int8_t v[4 * LANES]; } OWN(B);
typedef struct { int32_t v[LANES]; } OWN(J);
INLINE OWN(B) OWN(low4)(I w) {
    OWN(B) r; FOUR w.v[part] = (w.v[part] ^ 0x88888888u) & 0x0f0f0f0fu;
    EACH for (int j = 0; j < 4; j++) r.v[4 * lane + j] = (int8_t)(w.v[lane / 4][lane % 4] >> 8 * j);
    return r;
}
INLINE OWN(B) OWN(high4)(I w) { FOUR w.v[part] >>= 4; return OWN(low4)(w); }
INLINE OWN(B) OWN(four8)(const int8_t *p) {
    OWN(B) r; EACH for (int j = 0; j < 4; j++) r.v[4 * lane + j] = p[j * LANES + lane];
    return r;
}
INLINE OWN(J) OWN(none)(void) { OWN(J) r; EACH r.v[lane] = 0; return r; }
INLINE OWN(J) OWN(dot8)(OWN(J) sum, OWN(B) w, int32_t four) {
    int8_t x[4];
    memcpy(x, &four, 4);
    EACH for (int j = 0; j < 4; j++) sum.v[lane] += w.v[4 * lane + j] * x[j];
    return sum;
}
INLINE OWN(J) OWN(dot4)(OWN(J) sum, OWN(B) w, int32_t four) { return OWN(dot8)(sum, w, four); }
INLINE V OWN(whole4)(OWN(J) sum) { float r[LANES]; EACH r[lane] = (float)sum.v[lane]; return NAME(load)(r); }
INLINE V OWN(whole8)(OWN(J) sum, int32_t of_x) { (void)of_x; return OWN(whole4)(sum); }
#include "bytes.h"
#undef TILES_ONE
#undef TILES_MANY
#undef ROW_TILE
#undef MANY_ROWS
#undef OUTPUTS
#undef PANEL_OUTPUTS
#undef ISA
#undef B
#undef J
