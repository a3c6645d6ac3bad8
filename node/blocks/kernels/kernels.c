/* Products of weight matrices with a few rows of float32 values, and a decode step of Llama-like blocks.
 *
 * Weights are multiplied in the form in which they are held; activations stay float32, so that results are exact to
 * rounding. No dependencies. The second half of this file is compiled once for each instruction set: the file includes
 * itself with ISA defined. `petalnode_select` takes the best one that the processor has.
 *
 * Two promises hold for every function and every instruction set:
 *   - the result for a row does not depend on the rows beside it, to the bit: each result is summed in an order that
 *     follows from the shape of the matrix alone;
 *   - `unpack` gives to the bit the float32 values that the packed weights stand for.
 *
 * Packed forms hold 16 rows (outputs) side by side, one in each lane of a vector, in "tiles"; outputs behind the last
 * one are zero. Of a tile:
 *   4 bits:  [inputs / 8][16] uint32, input 8 i + j of a row in bits 4 j .. 4 j + 3;
 *   8 bits:  [inputs][16] int8;
 *   scales and offsets: [inputs / block][16] float16 or float32, one for each block of a row's inputs.
 * Forms of 16 and 32 bits are row-major, as checkpoints have them.
 */
#ifndef ISA

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif
#define INLINE static inline __attribute__((always_inline, unused))

#define LANES 16
#define INTERFACE 1 /* of this file towards library.py */
#define MOST_ROWS 8 /* that are multiplied at a time */

enum form {
    FORM_F32 = 0,
    FORM_BF16 = 1,
    FORM_F16 = 2,
    FORM_Q4 = 3,       /* scale * code + offset, code 0 .. 15 held as code - 8; scale and offset float16 */
    FORM_Q4_WIDE = 4,  /* the same with float32 */
    FORM_NF4 = 5,      /* scale * table[code]; scale float32 */
    FORM_Q8 = 6,       /* scale * code + offset, code -128 .. 127; scale and offset float16 */
    FORM_Q8_WIDE = 7,  /* the same with float32 */
    FORM_Q8_PLAIN = 8, /* scale * code; scale float32 */
    FORM_Q8_HALF = 9,  /* scale * code; scale float16 */
};

#define HALF_SCALES(form) ((form) == FORM_Q4 || (form) == FORM_Q8 || (form) == FORM_Q8_HALF)
#define HAS_OFFSETS(form) ((form) != FORM_NF4 && (form) != FORM_Q8_PLAIN && (form) != FORM_Q8_HALF)

struct matrix {
    int32_t form, out, in, block;
    const void *codes, *scales, *offsets;
    const float *bias; /* [out], or NULL */
};

/* One row of a batch: `memory` is its session's cache, for each block keys, then values, each
 * [batch][kv_heads][max_length][head_dim]; `length` tokens are held, those before `padding` are not looked at. */
struct row {
    float *memory;
    int64_t batch, row, max_length, length, padding;
};

struct block {
    const float *input_norm, *output_norm, *query_norm, *key_norm; /* the last two may be NULL */
    int64_t window;                                                /* tokens that are looked at, 0: all */
    struct matrix query, key, value, output, gate, up, down;
};

struct shape {
    int32_t hidden, heads, kv_heads, head_dim, inner, unused;
    float eps, scale;
};

static const float NF4_TABLE[LANES] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};
static const float SIGNED_TABLE[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};

INLINE float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* IEEE float16 to float32, without instructions for it. */
INLINE float half_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
    if (exponent == 31) return bits_float(sign | 0x7f800000u | fraction << 13);
    if (exponent) return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
    float small = (float)fraction * 0x1p-24f;
    return sign ? -small : small;
}

/* float32 to the nearest float16, ties to even. */
static uint16_t float_half(float value) {
    uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
    if (bits < 0x38800000u) {
        float shifted = bits_float(bits) + 0.5f; /* rounds to multiples of 2^-24 */
        return (uint16_t)(sign | (float_bits(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | (((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - (112u << 10)));
}

/* e^x to about two units in the last place; branch-free, so that loops over it are vectorised. */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float turns = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the fraction is rounded away */
    uint32_t exponent = float_bits(turns) + 127u;
    turns -= 12582912.0f;
    float rest = x - turns * 0.693359375f + turns * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    return (sum * rest * rest + rest + 1.0f) * bits_float(exponent << 23);
}

struct kernels {
    const char *name;
    void (*multiply)(const struct matrix *, const float *x, int64_t rows, float *y, float *scratch);
    void (*unpack)(const struct matrix *, int64_t first, int64_t last, float *panel);
    void (*step)(const struct shape *, const struct block *, int64_t blocks, const struct row *, int64_t rows,
                 const float *cosines, const float *sines, float *hidden, float *scratch);
};

struct choice {
    int64_t rows, tiles;
    void (*many)(const struct matrix *, int64_t tile, const float *x, const float *sums, float *y);
    void (*one)(const struct matrix *, int64_t tile, const float *x, const float *sums, float *y);
};

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define NAME(name) JOIN(name, ISA)
#define STRING2(text) #text
#define STRING(text) STRING2(text)

/* --- what each instruction set has to offer: vectors of 16 float32 --- */

#define ISA plain
typedef struct { float v[LANES]; } V_plain;
typedef struct { uint32_t v[LANES]; } I_plain;
#define EACH for (int lane = 0; lane < LANES; lane++)
INLINE V_plain zero_plain(void) { V_plain r; EACH r.v[lane] = 0; return r; }
INLINE V_plain set_plain(float x) { V_plain r; EACH r.v[lane] = x; return r; }
INLINE V_plain load_plain(const float *p) { V_plain r; memcpy(r.v, p, sizeof r.v); return r; }
INLINE void store_plain(float *p, V_plain a) { memcpy(p, a.v, sizeof a.v); }
INLINE V_plain mul_plain(V_plain a, V_plain b) { EACH a.v[lane] *= b.v[lane]; return a; }
INLINE V_plain add_plain(V_plain a, V_plain b) { EACH a.v[lane] += b.v[lane]; return a; }
INLINE V_plain fma_plain(V_plain a, V_plain b, V_plain c) { EACH c.v[lane] += a.v[lane] * b.v[lane]; return c; }
INLINE V_plain half_plain(const uint16_t *p) { V_plain r; EACH r.v[lane] = half_float(p[lane]); return r; }
INLINE V_plain brain_plain(const uint16_t *p) { V_plain r; EACH r.v[lane] = bits_float((uint32_t)p[lane] << 16); return r; }
INLINE V_plain bytes_plain(const int8_t *p) { V_plain r; EACH r.v[lane] = (float)p[lane]; return r; }
INLINE I_plain words_plain(const uint32_t *p) { I_plain r; memcpy(r.v, p, sizeof r.v); return r; }
INLINE V_plain signed4_plain(I_plain w, int j) {
    V_plain r; EACH r.v[lane] = (float)((int32_t)(w.v[lane] << (28 - 4 * j)) >> 28); return r;
}
INLINE V_plain table4_plain(I_plain w, int j) {
    V_plain r; EACH r.v[lane] = NF4_TABLE[w.v[lane] >> (4 * j) & 15u]; return r;
}
INLINE float total_plain(V_plain a) {
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) a.v[lane] += a.v[lane + half];
    return a.v[0];
}
#define TILES_ONE 1
#define TILES_MANY 1
#define ROW_TILE 2
#define OUTPUTS 2
#define UNROLL
#include "kernels.c"
#undef UNROLL
/* Loops over the registers of a tile are unrolled, or the tile would not be kept in registers. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define ISA avx2
typedef struct { __m256 a, b; } V_avx2;
typedef struct { __m256i a, b; } I_avx2;
#define BOTH(x, y) (V_avx2){x, y}
INLINE V_avx2 zero_avx2(void) { return BOTH(_mm256_setzero_ps(), _mm256_setzero_ps()); }
INLINE V_avx2 set_avx2(float x) { return BOTH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE V_avx2 load_avx2(const float *p) { return BOTH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void store_avx2(float *p, V_avx2 v) { _mm256_storeu_ps(p, v.a); _mm256_storeu_ps(p + 8, v.b); }
INLINE V_avx2 mul_avx2(V_avx2 x, V_avx2 y) { return BOTH(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
INLINE V_avx2 add_avx2(V_avx2 x, V_avx2 y) { return BOTH(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
INLINE V_avx2 fma_avx2(V_avx2 x, V_avx2 y, V_avx2 z) {
    return BOTH(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
#define LOAD128(p) _mm_loadu_si128((const __m128i *)(p))
INLINE V_avx2 half_avx2(const uint16_t *p) {
    return BOTH(_mm256_cvtph_ps(LOAD128(p)), _mm256_cvtph_ps(LOAD128(p + 8)));
}
INLINE V_avx2 brain_avx2(const uint16_t *p) {
    __m256i a = _mm256_slli_epi32(_mm256_cvtepu16_epi32(LOAD128(p)), 16);
    __m256i b = _mm256_slli_epi32(_mm256_cvtepu16_epi32(LOAD128(p + 8)), 16);
    return BOTH(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
}
INLINE V_avx2 bytes_avx2(const int8_t *p) {
    __m128i low = _mm_loadl_epi64((const __m128i *)p), high = _mm_loadl_epi64((const __m128i *)(p + 8));
    return BOTH(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)));
}
INLINE I_avx2 words_avx2(const uint32_t *p) {
    return (I_avx2){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8))};
}
INLINE __m256 signed4_one_avx2(__m256i w, int j) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 28 - 4 * j), 28));
}
INLINE V_avx2 signed4_avx2(I_avx2 w, int j) { return BOTH(signed4_one_avx2(w.a, j), signed4_one_avx2(w.b, j)); }
INLINE __m256 table4_one_avx2(__m256i w, int j) {
    __m256i index = _mm256_srli_epi32(w, 4 * j);
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(NF4_TABLE), index);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(NF4_TABLE + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(w, 28 - 4 * j)));
}
INLINE V_avx2 table4_avx2(I_avx2 w, int j) { return BOTH(table4_one_avx2(w.a, j), table4_one_avx2(w.b, j)); }
INLINE float total_avx2(V_avx2 v) {
    __m256 eight = _mm256_add_ps(v.a, v.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#define TILES_ONE 2
#define TILES_MANY 1
#define ROW_TILE 4
#define OUTPUTS 2
#include "kernels.c"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define ISA avx512
typedef __m512 V_avx512;
typedef __m512i I_avx512;
#define LOAD256(p) _mm256_loadu_si256((const __m256i *)(p))
INLINE V_avx512 zero_avx512(void) { return _mm512_setzero_ps(); }
INLINE V_avx512 set_avx512(float x) { return _mm512_set1_ps(x); }
INLINE V_avx512 load_avx512(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store_avx512(float *p, V_avx512 a) { _mm512_storeu_ps(p, a); }
INLINE V_avx512 mul_avx512(V_avx512 a, V_avx512 b) { return _mm512_mul_ps(a, b); }
INLINE V_avx512 add_avx512(V_avx512 a, V_avx512 b) { return _mm512_add_ps(a, b); }
INLINE V_avx512 fma_avx512(V_avx512 a, V_avx512 b, V_avx512 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V_avx512 half_avx512(const uint16_t *p) { return _mm512_cvtph_ps(LOAD256(p)); }
INLINE V_avx512 brain_avx512(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(LOAD256(p)), 16));
}
INLINE V_avx512 bytes_avx512(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(LOAD128(p))); }
INLINE I_avx512 words_avx512(const uint32_t *p) { return _mm512_loadu_si512(p); }
/* The permutation looks at the low four bits of each lane alone. */
INLINE V_avx512 signed4_avx512(I_avx512 w, int j) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * j), _mm512_loadu_ps(SIGNED_TABLE));
}
INLINE V_avx512 table4_avx512(I_avx512 w, int j) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * j), _mm512_loadu_ps(NF4_TABLE));
}
INLINE float total_avx512(V_avx512 v) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#define TILES_ONE 4
#define TILES_MANY 2
#define ROW_TILE 8
#define OUTPUTS 4
#include "kernels.c"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#elif defined(__aarch64__)
#define ISA neon
typedef struct { float32x4_t v[4]; } V_neon;
typedef struct { uint32x4_t v[4]; } I_neon;
#define FOUR for (int part = 0; part < 4; part++)
INLINE V_neon set_neon(float x) { V_neon r; FOUR r.v[part] = vdupq_n_f32(x); return r; }
INLINE V_neon zero_neon(void) { return set_neon(0.0f); }
INLINE V_neon load_neon(const float *p) { V_neon r; FOUR r.v[part] = vld1q_f32(p + 4 * part); return r; }
INLINE void store_neon(float *p, V_neon a) { FOUR vst1q_f32(p + 4 * part, a.v[part]); }
INLINE V_neon mul_neon(V_neon a, V_neon b) { FOUR a.v[part] = vmulq_f32(a.v[part], b.v[part]); return a; }
INLINE V_neon add_neon(V_neon a, V_neon b) { FOUR a.v[part] = vaddq_f32(a.v[part], b.v[part]); return a; }
INLINE V_neon fma_neon(V_neon a, V_neon b, V_neon c) { FOUR c.v[part] = vfmaq_f32(c.v[part], a.v[part], b.v[part]); return c; }
INLINE V_neon half_neon(const uint16_t *p) {
    V_neon r; FOUR r.v[part] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * part))); return r;
}
INLINE V_neon brain_neon(const uint16_t *p) {
    V_neon r; FOUR r.v[part] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * part), 16)); return r;
}
INLINE V_neon bytes_neon(const int8_t *p) {
    int8x16_t all = vld1q_s8(p);
    int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_s8(vget_high_s8(all));
    return (V_neon){{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
                     vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
INLINE I_neon words_neon(const uint32_t *p) { I_neon r; FOUR r.v[part] = vld1q_u32(p + 4 * part); return r; }
INLINE V_neon signed4_neon(I_neon w, int j) {
    V_neon r;
    FOUR {
        int32x4_t top = vreinterpretq_s32_u32(vshlq_u32(w.v[part], vdupq_n_s32(28 - 4 * j)));
        r.v[part] = vcvtq_f32_s32(vshrq_n_s32(top, 28));
    }
    return r;
}
INLINE V_neon table4_neon(I_neon w, int j) {
    const uint8_t *bytes = (const uint8_t *)NF4_TABLE;
    uint8x16x4_t table = {{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
    V_neon r;
    FOUR {
        uint32x4_t code = vandq_u32(vshlq_u32(w.v[part], vdupq_n_s32(-4 * j)), vdupq_n_u32(15));
        uint32x4_t places = vmlaq_n_u32(vdupq_n_u32(0x03020100u), code, 0x04040404u);
        r.v[part] = vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(places)));
    }
    return r;
}
INLINE float total_neon(V_neon a) {
    return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3])));
}
#define TILES_ONE 2
#define TILES_MANY 1
#define ROW_TILE 4
#define OUTPUTS 2
#include "kernels.c"
#endif

/* --- choice of instruction set --- */

static const struct kernels *chosen = &kernels_plain;

#if defined(__x86_64__)
static int has_half(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

static int available(const char *name) {
    if (!strcmp(name, "plain")) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_half();
    if (!strcmp(name, "avx2")) return avx2;
    if (!strcmp(name, "avx512"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__aarch64__)
    if (!strcmp(name, "neon")) return 1;
#endif
    return 0;
}

/* Takes the kernels of this name, or with NULL the best; returns the name of what is in use now, NULL if there are no
 * such kernels here. Not while others compute. */
EXPORT const char *petalnode_select(const char *name) {
    static const struct kernels *const all[] = {
#if defined(__x86_64__)
        &kernels_avx512, &kernels_avx2,
#elif defined(__aarch64__)
        &kernels_neon,
#endif
        &kernels_plain,
    };
    for (unsigned index = 0; index < sizeof all / sizeof *all; index++)
        if ((!name || !strcmp(name, all[index]->name)) && available(all[index]->name)) {
            chosen = all[index];
            return chosen->name;
        }
    return NULL;
}

EXPORT int32_t petalnode_interface(void) { return INTERFACE; }

/* y [rows][out] = x [rows][in] times the transpose of the matrix, plus its bias.
 * `scratch`: MOST_ROWS * (in / block + 16) float32. */
EXPORT void petalnode_multiply(const struct matrix *matrix, const float *x, int64_t rows, float *y, float *scratch) {
    chosen->multiply(matrix, x, rows, y, scratch);
}

/* Rows 16 first .. 16 last - 1 of the matrix as float32, transposed: panel [in][16 (last - first)]. */
EXPORT void petalnode_unpack(const struct matrix *matrix, int64_t first, int64_t last, float *panel) {
    chosen->unpack(matrix, first, last, panel);
}

/* One token of each row through the blocks: hidden [rows][hidden] in place, keys and values into the rows' caches.
 * `cosines`, `sines` [rows][head_dim]. `scratch`: petalnode_step_scratch float32. */
EXPORT void petalnode_step(const struct shape *shape, const struct block *blocks, int64_t count, const struct row *rows,
                           int64_t number, const float *cosines, const float *sines, float *hidden, float *scratch) {
    chosen->step(shape, blocks, count, rows, number, cosines, sines, hidden, scratch);
}

EXPORT int64_t petalnode_step_scratch(const struct shape *shape, int64_t rows, int64_t longest) {
    int64_t wide = shape->heads * shape->head_dim, narrow = shape->kv_heads * shape->head_dim;
    int64_t values = 2 * (int64_t)shape->hidden + 2 * wide + 2 * narrow + 2 * (int64_t)shape->inner;
    int64_t in = shape->inner > wide ? shape->inner : wide;
    in = in > shape->hidden ? in : shape->hidden;
    return rows * values + shape->heads * (longest + LANES) + MOST_ROWS * (in + LANES);
}

/* --- packing: finds the few numbers that float32 weights were made of, or says that they were not --- */

/* Whether scale * (0 .. levels - 1) + offset gives all the values to the bit; the codes, if so. */
static int affine(const float *values, int count, int levels, float scale, float offset, uint8_t *codes) {
    for (int index = 0; index < count; index++) {
        float code = scale ? (values[index] - offset) / scale + 0.5f : 0.0f;
        if (!(code >= 0.0f && code < (float)levels)) return 0;
        int whole = (int)code;
        if (scale * (float)whole + offset != values[index]) return 0;
        codes[index] = (uint8_t)whole;
    }
    return 1;
}

/* A block of 32 whose least value is its offset: GGUF's Q4_1 and Q5_1, and Q4_0 and Q5_0, whose value of the largest
 * magnitude is -levels / 2 scales. */
static int find_affine(const float *values, int levels, uint16_t *scale, uint16_t *offset, uint8_t *codes) {
    float least = values[0], most = values[0], largest = values[0];
    for (int index = 1; index < 32; index++) {
        float value = values[index];
        if (value < least) least = value;
        if (value > most) most = value;
        if ((value < 0 ? -value : value) > (largest < 0 ? -largest : largest)) largest = value;
    }
    if (!(least >= -60000.0f && most <= 60000.0f)) return 0;
    float middle = (float)(levels / 2);
    *scale = float_half(-largest / middle);
    *offset = float_half(-middle * half_float(*scale));
    if (affine(values, 32, levels, half_float(*scale), half_float(*offset), codes)) return 1;
    *offset = float_half(least);
    if (half_float(*offset) != least) return 0;
    for (int top = levels - 1; top > 0; top--) {
        uint16_t near = float_half((most - least) / (float)top);
        for (int step = -1; step <= 1; step++) {
            *scale = (uint16_t)(near + step);
            if (near + step < 0) continue;
            if (affine(values, 32, levels, half_float(*scale), least, codes)) return 1;
        }
        if (most == least) break;
    }
    return 0;
}

/* A block of 32 whose values are whole multiples, up to 127, of a float16: GGUF's Q8_0. */
static int find_multiples(const float *values, uint16_t *scale, int8_t *codes) {
    float largest = 0.0f;
    for (int index = 0; index < 32; index++) {
        float size = values[index] < 0 ? -values[index] : values[index];
        if (size > largest) largest = size;
    }
    if (!(largest <= 60000.0f)) return 0;
    for (int top = 127; top > 63; top--) {
        uint16_t near = float_half(largest / (float)top);
        for (int step = -1; step <= 1; step++) {
            if (near + step < 0) continue;
            *scale = (uint16_t)(near + step);
            float unit = half_float(*scale);
            int index = 0;
            for (; index < 32; index++) {
                float code = unit ? values[index] / unit : 0.0f;
                if (!(code >= -127.5f && code <= 127.5f)) break;
                codes[index] = (int8_t)(code < 0 ? code - 0.5f : code + 0.5f);
                if (unit * (float)codes[index] != values[index]) break;
            }
            if (index == 32) return 1;
        }
        if (largest == 0.0f) break;
    }
    return 0;
}

/* A block of 16 whose values are whole multiples, -32 .. 31, of a float32: GGUF's Q6_K. */
static int find_wide_multiples(const float *values, float *scale, int8_t *codes) {
    float smallest = 0.0f;
    for (int index = 0; index < 16; index++) {
        float size = values[index] < 0 ? -values[index] : values[index];
        if (!(size < 1e30f)) return 0;
        if (size > 0 && (smallest == 0.0f || size < smallest)) smallest = size;
    }
    for (int least = 1; least <= 32; least++) {
        *scale = smallest / (float)least;
        int index = 0;
        for (; index < 16; index++) {
            float code = smallest > 0 ? values[index] / *scale : 0.0f;
            if (!(code >= -32.5f && code <= 32.5f)) break;
            codes[index] = (int8_t)(code < 0 ? code - 0.5f : code + 0.5f);
            if (*scale * (float)codes[index] != values[index]) break;
        }
        if (index == 16) return 1;
        if (smallest == 0.0f) break;
    }
    return 0;
}

/* The nearest number of 17 significant bits: what a float16 times a scale of 6 bits has at most. */
INLINE float seventeen_bits(float value) { return bits_float((float_bits(value) + 0x40u) & ~0x7fu); }

/* A block of 32 whose values are scale * (0 .. levels - 1) + offset with scale and offset of 17 bits: GGUF's Q4_K, Q5_K. */
static int find_wide_affine(const float *values, int levels, float *scale, float *offset, uint8_t *codes) {
    float least = values[0], most = values[0];
    for (int index = 1; index < 32; index++) {
        if (values[index] < least) least = values[index];
        if (values[index] > most) most = values[index];
    }
    if (!(least > -1e30f && most < 1e30f)) return 0;
    *scale = 0.0f;
    *offset = least;
    if (most == least) return affine(values, 32, levels, 0.0f, least, codes);
    for (int range = levels - 1; range > 0; range--) {
        *scale = seventeen_bits((most - least) / (float)range);
        for (int first = 0; first + range < levels; first++) { /* the code of the least value */
            *offset = seventeen_bits(least - *scale * (float)first);
            if (affine(values, 32, levels, *scale, *offset, codes)) return 1;
        }
    }
    return 0;
}

/* Packs float32 weights [out][in] if `form` holds them to the bit: one of 4 or 8 bits, in blocks of 16 for Q8_PLAIN and
 * of 32 for the others. `codes`, `scales` and `offsets` are zeroed before. Returns whether it does. */
EXPORT int32_t petalnode_pack(int32_t form, const float *weights, int64_t out, int64_t in, void *codes, void *scales,
                              void *offsets) {
    int64_t block = form == FORM_Q8_PLAIN ? 16 : 32, count = in / block;
    if (in % 32) return 0;
    for (int64_t row = 0; row < out; row++) {
        int64_t tile = row / LANES, lane = row % LANES;
        for (int64_t number = 0; number < count; number++) {
            const float *values = weights + row * in + number * block;
            int64_t place = (tile * count + number) * LANES + lane, first = number * block;
            uint8_t found[32];
            int8_t *whole = (int8_t *)found;
            const int levels = form == FORM_Q4 || form == FORM_Q4_WIDE ? 16 : 32;
            if (form == FORM_Q4_WIDE || form == FORM_Q8_WIDE) {
                if (!find_wide_affine(values, levels, (float *)scales + place, (float *)offsets + place, found)) return 0;
            } else if (form == FORM_Q4 || form == FORM_Q8) {
                if (!find_affine(values, levels, (uint16_t *)scales + place, (uint16_t *)offsets + place, found)) return 0;
            } else if (form == FORM_Q8_HALF) {
                if (!find_multiples(values, (uint16_t *)scales + place, whole)) return 0;
            } else if (!find_wide_multiples(values, (float *)scales + place, whole)) {
                return 0;
            }
            for (int64_t index = 0; index < block; index++) {
                int64_t input = first + index;
                if (levels == 16)
                    ((uint32_t *)codes)[(tile * (in / 8) + input / 8) * LANES + lane] |=
                        (uint32_t)((found[index] - 8) & 15) << 4 * (input % 8);
                else
                    ((int8_t *)codes)[(tile * in + input) * LANES + lane] = whole[index];
            }
        }
    }
    return 1;
}

/* NF4 codes [out][in / 2], two to a byte with the first in the high half, into tiles. `codes` is zeroed before. */
EXPORT void petalnode_tile_nf4(const uint8_t *pairs, int64_t out, int64_t in, uint32_t *codes) {
    for (int64_t row = 0; row < out; row++)
        for (int64_t input = 0; input < in; input++) {
            uint32_t code = pairs[(row * in + input) / 2] >> (input % 2 ? 0 : 4) & 15u;
            codes[(row / LANES * (in / 8) + input / 8) * LANES + row % LANES] |= code << 4 * (input % 8);
        }
}

#else /* ISA: what follows is compiled for each instruction set */

#define V NAME(V)
#define I NAME(I)

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

/* `tiles` tiles from `tile` on, times `rows` rows of x. `kind`: 4 (codes), 5 (NF4) or 8. */
INLINE void NAME(tile_product)(const struct matrix *m, int kind, int tiles, int rows, int64_t tile, const float *x,
                        const float *sums, float *y) {
    const int half = HALF_SCALES(m->form), offset = HAS_OFFSETS(m->form);
    const int64_t in = m->in, block = m->block, count = in / block;
    const int64_t words = kind == 8 ? in * LANES : in / 8 * LANES;
    V total[4][MOST_ROWS];
    UNROLL for (int t = 0; t < tiles; t++)
        UNROLL for (int r = 0; r < rows; r++) total[t][r] = NAME(zero)();
    for (int64_t number = 0; number < count; number++) {
        V part[4][MOST_ROWS];
        UNROLL for (int t = 0; t < tiles; t++)
            UNROLL for (int r = 0; r < rows; r++) part[t][r] = NAME(zero)();
        const float *xs = x + number * block;
        if (kind == 8) {
            const int8_t *codes = (const int8_t *)m->codes + tile * words + number * block * LANES;
            for (int64_t k = 0; k < block; k++) {
                V w[4];
                UNROLL for (int t = 0; t < tiles; t++) {
                    w[t] = NAME(bytes)(codes + t * words + k * LANES);
                    if (k % 4 == 0) __builtin_prefetch(codes + (tiles + t) * words + k * LANES);
                }
                UNROLL for (int r = 0; r < rows; r++) {
                    V value = NAME(set)(xs[r * in + k]);
                    UNROLL for (int t = 0; t < tiles; t++) part[t][r] = NAME(fma)(w[t], value, part[t][r]);
                }
            }
        } else {
            const uint32_t *codes = (const uint32_t *)m->codes + tile * words + number * block / 8 * LANES;
            for (int64_t k = 0; k < block; k += 8) {
                I eight[4];
                UNROLL for (int t = 0; t < tiles; t++) {
                    eight[t] = NAME(words)(codes + t * words + k / 8 * LANES);
                    __builtin_prefetch(codes + (tiles + t) * words + k / 8 * LANES); /* for the tiles that come next */
                }
                UNROLL for (int j = 0; j < 8; j++) {
                    V w[4];
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
    UNROLL for (int t = 0; t < tiles; t++) {
        int64_t first = (tile + t) * LANES, left = m->out - first;
        UNROLL for (int r = 0; r < rows; r++) {
            float *into = y + (int64_t)r * m->out + first;
            if (left >= LANES) {
                V result = total[t][r];
                if (m->bias) result = NAME(add)(result, NAME(load)(m->bias + first));
                NAME(store)(into, result);
            } else {
                float last[LANES];
                NAME(store)(last, total[t][r]);
                for (int64_t lane = 0; lane < left; lane++) into[lane] = last[lane] + (m->bias ? m->bias[first + lane] : 0.0f);
            }
        }
    }
}

/* A function for each kind and size of tile: `rows` rows of x and as many tiles of the matrix as registers hold. */
#define TILES(kind, rows, tiles)                                                                                      \
    static __attribute__((noinline)) void NAME(many_##kind##_##rows)(                                                 \
        const struct matrix *m, int64_t tile, const float *x, const float *sums, float *y) {                          \
        NAME(tile_product)(m, kind, tiles, rows, tile, x, sums, y);                                                          \
    }                                                                                                                 \
    static __attribute__((noinline)) void NAME(one_##kind##_##rows)(                                                  \
        const struct matrix *m, int64_t tile, const float *x, const float *sums, float *y) {                          \
        NAME(tile_product)(m, kind, 1, rows, tile, x, sums, y);                                                              \
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

static void NAME(tiled)(const struct matrix *m, const struct choice *choice, const float *x, int64_t rows, float *y,
                        float *sums) {
    const int64_t all = (m->out + LANES - 1) / LANES, in = m->in, count = in / m->block;
    for (int64_t done = 0; done < rows;) {
        while (choice->rows > rows - done) choice++; /* the largest first, rows of one at the end */
        if (HAS_OFFSETS(m->form))
            for (int64_t r = 0; r < choice->rows; r++)
                for (int64_t number = 0; number < count; number++) {
                    V sum = NAME(zero)();
                    for (int64_t k = 0; k < m->block; k += LANES)
                        sum = NAME(add)(sum, NAME(load)(x + r * in + number * m->block + k));
                    sums[r * count + number] = NAME(total)(sum);
                }
        int64_t tile = 0;
        for (; tile + choice->tiles <= all; tile += choice->tiles) choice->many(m, tile, x, sums, y);
        for (; tile < all; tile++) choice->one(m, tile, x, sums, y);
        done += choice->rows;
        x += choice->rows * in;
        y += choice->rows * (int64_t)m->out;
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
            UNROLL for (int r = 0; r < rows; r++) total[o][r] = NAME(fma)(w, value[r], total[o][r]);
        }
    }
    UNROLL for (int o = 0; o < outputs; o++)
        UNROLL for (int r = 0; r < rows; r++) {
            float bias = m->bias ? m->bias[first + o] : 0.0f;
            y[(int64_t)r * m->out + first + o] = NAME(total)(total[o][r]) + bias;
        }
}

static void NAME(row_major)(const struct matrix *m, int form, const float *x, int64_t rows, float *y) {
    /* Outputs outside, in panels that stay in the processor's nearest cache while all rows are taken. */
    for (int64_t panel = 0; panel < m->out; panel += 16) {
        int64_t end = panel + 16 < m->out ? panel + 16 : m->out;
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

static void NAME(multiply)(const struct matrix *m, const float *x, int64_t rows, float *y, float *scratch) {
    switch (m->form) {
    case FORM_F32: NAME(row_major)(m, FORM_F32, x, rows, y); break;
    case FORM_BF16: NAME(row_major)(m, FORM_BF16, x, rows, y); break;
    case FORM_F16: NAME(row_major)(m, FORM_F16, x, rows, y); break;
    case FORM_Q4: case FORM_Q4_WIDE: NAME(tiled)(m, NAME(choices_4), x, rows, y, scratch); break;
    case FORM_NF4: NAME(tiled)(m, NAME(choices_5), x, rows, y, scratch); break;
    default: NAME(tiled)(m, NAME(choices_8), x, rows, y, scratch);
    }
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

/* --- a decode step --- */

INLINE void NAME(rms_norm)(const float *x, const float *weight, int64_t count, float eps, float *y) {
    float mean = NAME(dot)(x, x, count) / (float)count + eps;
    V factor = NAME(set)(1.0f / __builtin_sqrtf(mean));
    for (int64_t index = 0; index < count; index += LANES)
        NAME(store)(y + index, NAME(mul)(NAME(load)(weight + index), NAME(mul)(NAME(load)(x + index), factor)));
}

/* Rotates the two halves of a head (Su et al. 2021, as in Llama's checkpoints). */
INLINE void NAME(rotate)(float *x, const float *cosines, const float *sines, int64_t dim) {
    for (int64_t index = 0; index < dim / 2; index++) {
        float low = x[index], high = x[index + dim / 2];
        x[index] = low * cosines[index] - high * sines[index];
        x[index + dim / 2] = high * cosines[index + dim / 2] + low * sines[index + dim / 2];
    }
}

static void NAME(softmax)(float *scores, int64_t count) {
    float most = scores[0], sum = 0.0f;
    for (int64_t index = 1; index < count; index++) most = scores[index] > most ? scores[index] : most;
    for (int64_t index = 0; index < count; index++) scores[index] = exponential(scores[index] - most);
    for (int64_t index = 0; index < count; index++) sum += scores[index];
    for (int64_t index = 0; index < count; index++) scores[index] /= sum;
}

/* Query heads of one row over keys and values of one head [tokens][dim]; `scores`: heads * tokens. */
INLINE void NAME(attend)(const float *query, int64_t heads, const float *keys, const float *values, int64_t tokens,
                         int64_t dim, float scale, float *scores, float *out) {
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++)
            scores[head * tokens + token] = NAME(dot)(query + head * dim, keys + token * dim, dim) * scale;
    for (int64_t head = 0; head < heads; head++) NAME(softmax)(scores + head * tokens, tokens);
    for (int64_t head = 0; head < heads; head++)
        for (int64_t first = 0; first < dim; first += 4 * LANES) {
            int parts = dim - first >= 4 * LANES ? 4 : (int)((dim - first) / LANES);
            V sum[4];
            UNROLL for (int part = 0; part < 4; part++) sum[part] = NAME(zero)();
            const float *share = scores + head * tokens;
            if (parts == 4)
                for (int64_t token = 0; token < tokens; token++) {
                    V weight = NAME(set)(share[token]);
                    UNROLL for (int part = 0; part < 4; part++)
                        sum[part] = NAME(fma)(weight, NAME(load)(values + token * dim + first + part * LANES), sum[part]);
                }
            else
                for (int64_t token = 0; token < tokens; token++)
                    UNROLL for (int part = 0; part < parts; part++)
                        sum[part] = NAME(fma)(NAME(set)(share[token]),
                                              NAME(load)(values + token * dim + first + part * LANES), sum[part]);
            UNROLL for (int part = 0; part < parts; part++) NAME(store)(out + head * dim + first + part * LANES, sum[part]);
        }
}

INLINE void NAME(add_to)(float *x, const float *y, int64_t count) {
    for (int64_t index = 0; index < count; index += LANES)
        NAME(store)(x + index, NAME(add)(NAME(load)(x + index), NAME(load)(y + index)));
}

static void NAME(attention)(const struct shape *s, const struct block *b, int64_t number, const struct row *rows,
                            int64_t count, const float *cosines, const float *sines, float *query, float *key,
                            const float *value, float *scores, float *out) {
    const int64_t dim = s->head_dim, group = s->heads / s->kv_heads;
    for (int64_t r = 0; r < count; r++) {
        const struct row *row = rows + r;
        const float *cosine = cosines + r * dim, *sine = sines + r * dim;
        int64_t length = row->length, first = row->padding < length ? row->padding : length;
        if (b->window && length + 1 - b->window > first) first = length + 1 - b->window;
        float *own = query + r * s->heads * dim, *fresh = key + r * s->kv_heads * dim;
        for (int64_t head = 0; head < s->heads; head++) {
            if (b->query_norm) NAME(rms_norm)(own + head * dim, b->query_norm, dim, s->eps, own + head * dim);
            NAME(rotate)(own + head * dim, cosine, sine, dim);
        }
        int64_t half = row->batch * s->kv_heads * row->max_length * dim;
        float *keys = row->memory + 2 * number * half + row->row * s->kv_heads * row->max_length * dim;
        for (int64_t head = 0; head < s->kv_heads; head++) {
            if (b->key_norm) NAME(rms_norm)(fresh + head * dim, b->key_norm, dim, s->eps, fresh + head * dim);
            NAME(rotate)(fresh + head * dim, cosine, sine, dim);
            float *held = keys + head * row->max_length * dim;
            memcpy(held + length * dim, fresh + head * dim, dim * sizeof(float));
            memcpy(held + half + length * dim, value + (r * s->kv_heads + head) * dim, dim * sizeof(float));
            NAME(attend)(own + head * group * dim, group, held + first * dim, held + half + first * dim,
                         length + 1 - first, dim, s->scale, scores, out + (r * s->heads + head * group) * dim);
        }
    }
}

static void NAME(step)(const struct shape *s, const struct block *blocks, int64_t count, const struct row *rows,
                       int64_t number, const float *cosines, const float *sines, float *hidden, float *scratch) {
    const int64_t wide = (int64_t)s->heads * s->head_dim, narrow = (int64_t)s->kv_heads * s->head_dim;
    float *normed = scratch, *added = normed + number * s->hidden, *query = added + number * s->hidden;
    float *attended = query + number * wide, *key = attended + number * wide, *value = key + number * narrow;
    float *gate = value + number * narrow, *up = gate + number * s->inner, *sums = up + number * s->inner;
    int64_t in = s->inner > wide ? s->inner : wide;
    float *scores = sums + MOST_ROWS * ((in > s->hidden ? in : s->hidden) + LANES);
    for (int64_t index = 0; index < count; index++) {
        const struct block *b = blocks + index;
        for (int64_t r = 0; r < number; r++)
            NAME(rms_norm)(hidden + r * s->hidden, b->input_norm, s->hidden, s->eps, normed + r * s->hidden);
        NAME(multiply)(&b->query, normed, number, query, sums);
        NAME(multiply)(&b->key, normed, number, key, sums);
        NAME(multiply)(&b->value, normed, number, value, sums);
        NAME(attention)(s, b, index, rows, number, cosines, sines, query, key, value, scores, attended);
        NAME(multiply)(&b->output, attended, number, added, sums);
        NAME(add_to)(hidden, added, number * s->hidden);
        for (int64_t r = 0; r < number; r++)
            NAME(rms_norm)(hidden + r * s->hidden, b->output_norm, s->hidden, s->eps, normed + r * s->hidden);
        NAME(multiply)(&b->gate, normed, number, gate, sums);
        NAME(multiply)(&b->up, normed, number, up, sums);
        for (int64_t place = 0; place < number * s->inner; place++)
            gate[place] = gate[place] / (1.0f + exponential(-gate[place])) * up[place];
        NAME(multiply)(&b->down, gate, number, added, sums);
        NAME(add_to)(hidden, added, number * s->hidden);
    }
}

static const struct kernels NAME(kernels) = {STRING(ISA), NAME(multiply), NAME(unpack), NAME(step)};

#undef V
#undef I
#undef ISA
#undef TILES_ONE
#undef TILES_MANY
#undef ROW_TILE
#undef OUTPUTS
#endif
