/* What x86.h uses of AVX-512 and VNNI, computed by AVX2, so that a processor without them runs the kernels written for
 * them: by Intel's "Intrinsics Guide", which says of each what it computes. */
#define _IMMINTRIN_H_INCLUDED /* gcc's, of which only these are taken */
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
#include <stdint.h>
#include <string.h>

#define AVX512 AVX2
#define AVX512_VNNI AVX2
#define AVX_VNNI AVX2
#define IN_REGISTER(v) (void)(v)
#define GIVES(type) __attribute__((target("avx2,fma,f16c"), always_inline, unused)) static inline type

typedef struct { __m256 low, high; } __m512;
typedef struct { __m256i low, high; } __m512i;

/* By halves: the name, the operation of 32 bytes, the types of result and argument. */
#define OF_ONE(name, half, result, type) GIVES(result) _mm512_##name(type a) { return (result){half(a.low), half(a.high)}; }
#define OF_TWO(name, half, type) \
    GIVES(type) _mm512_##name(type a, type b) { return (type){half(a.low, b.low), half(a.high, b.high)}; }
#define SHIFT(name, half) GIVES(__m512i) _mm512_##name(__m512i a, int bits) { return (__m512i){half(a.low, bits), half(a.high, bits)}; }
#define REPEATED(name, half, result, type) GIVES(result) _mm512_##name(type x) { return (result){half(x), half(x)}; }
#define NONE(name, half, result) GIVES(result) _mm512_##name(void) { return (result){half(), half()}; }
OF_ONE(abs_epi8, _mm256_abs_epi8, __m512i, __m512i)
OF_ONE(cvtepi32_ps, _mm256_cvtepi32_ps, __m512, __m512i)
OF_ONE(castsi512_ps, _mm256_castsi256_ps, __m512, __m512i)
OF_TWO(add_ps, _mm256_add_ps, __m512)
OF_TWO(mul_ps, _mm256_mul_ps, __m512)
OF_TWO(add_epi16, _mm256_add_epi16, __m512i)
OF_TWO(add_epi32, _mm256_add_epi32, __m512i)
OF_TWO(sub_epi32, _mm256_sub_epi32, __m512i)
OF_TWO(and_si512, _mm256_and_si256, __m512i)
OF_TWO(xor_si512, _mm256_xor_si256, __m512i)
OF_TWO(madd_epi16, _mm256_madd_epi16, __m512i)
OF_TWO(maddubs_epi16, _mm256_maddubs_epi16, __m512i)
OF_TWO(shuffle_epi8, _mm256_shuffle_epi8, __m512i)
SHIFT(srli_epi16, _mm256_srli_epi16)
SHIFT(srli_epi32, _mm256_srli_epi32)
REPEATED(set1_ps, _mm256_set1_ps, __m512, float)
REPEATED(set1_epi8, _mm256_set1_epi8, __m512i, char)
REPEATED(set1_epi16, _mm256_set1_epi16, __m512i, short)
REPEATED(set1_epi32, _mm256_set1_epi32, __m512i, int)
REPEATED(broadcast_i32x4, _mm256_broadcastsi128_si256, __m512i, __m128i)
NONE(setzero_ps, _mm256_setzero_ps, __m512)
NONE(setzero_si512, _mm256_setzero_si256, __m512i)

#define _mm512_loadu_ps(p) ((__m512){_mm256_loadu_ps(p), _mm256_loadu_ps((p) + 8)})
#define _mm512_extractf32x8_ps(v, half) ((half) ? (v).high : (v).low)
#define _mm512_castps512_ps256(v) ((v).low)
#define _mm512_castsi256_si512(v) ((__m512i){v, _mm256_setzero_si256()})
GIVES(__m512i) _mm512_loadu_si512(const void *p) {
    return (__m512i){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
GIVES(void) _mm512_storeu_ps(float *p, __m512 v) { _mm256_storeu_ps(p, v.low), _mm256_storeu_ps(p + 8, v.high); }
GIVES(__m512) _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return (__m512){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
GIVES(__m512) _mm512_cvtph_ps(__m256i v) {
    return (__m512){_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
}
GIVES(__m512i) _mm512_cvtepi8_epi32(__m128i v) {
    return (__m512i){_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
}
#define _mm512_set_epi32(p, o, n, m, l, k, j, i, h, g, f, e, d, c, b, a) \
    ((__m512i){_mm256_set_epi32(h, g, f, e, d, c, b, a), _mm256_set_epi32(p, o, n, m, l, k, j, i)})

/* Lanes by the low bits of their places. */
#define LOOKED_UP(name, result, of, element, lanes) \
    GIVES(result) name(__m512i places, of from) { \
        element place[lanes], value[lanes], found[lanes]; \
        result made; \
        memcpy(place, &places, 64), memcpy(value, &from, 64); \
        for (int lane = 0; lane < (lanes); lane++) found[lane] = value[place[lane] & ((lanes) - 1)]; \
        memcpy(&made, found, 64); \
        return made; \
    }
LOOKED_UP(_mm512_permutexvar_ps, __m512, __m512, uint32_t, 16)
LOOKED_UP(_mm512_permutexvar_epi32, __m512i, __m512i, uint32_t, 16)
LOOKED_UP(words_of, __m512i, __m512i, uint16_t, 32)

/* Lanes of which a mask has no bit are zero, or those of `otherwise`. */
GIVES(__m512i) _mm512_maskz_permutexvar_epi16(uint32_t mask, __m512i places, __m512i from) {
    const __m512i found = words_of(places, from);
    uint16_t lanes[32];
    memcpy(lanes, &found, 64);
    for (int lane = 0; lane < 32; lane++) lanes[lane] = mask >> lane & 1 ? lanes[lane] : 0;
    return _mm512_loadu_si512(lanes);
}
GIVES(uint64_t) _mm512_movepi8_mask(__m512i v) {
    return (uint32_t)_mm256_movemask_epi8(v.low) | (uint64_t)(uint32_t)_mm256_movemask_epi8(v.high) << 32;
}
GIVES(__m512i) _mm512_mask_sub_epi8(__m512i otherwise, uint64_t mask, __m512i a, __m512i b) {
    int8_t less[64], from[64], made[64];
    memcpy(from, &a, 64), memcpy(less, &b, 64), memcpy(made, &otherwise, 64);
    for (int lane = 0; lane < 64; lane++)
        if (mask >> lane & 1) made[lane] = (int8_t)(from[lane] - less[lane]);
    return _mm512_loadu_si512(made);
}

/* Sums of four products of a byte without a sign and one with it, in 32 bits. */
GIVES(__m256i) _mm256_dpbusd_avx_epi32(__m256i sums, __m256i a, __m256i b) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi16(255);
    const __m256i even = _mm256_madd_epi16(_mm256_mullo_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8)), ones);
    const __m256i odd = _mm256_madd_epi16(_mm256_mullo_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8)), ones);
    return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}
GIVES(__m512i) _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    return (__m512i){_mm256_dpbusd_avx_epi32(sums.low, a.low, b.low), _mm256_dpbusd_avx_epi32(sums.high, a.high, b.high)};
}
