/* Vectors of 16 float32 and products of bytes by AVX2 and AVX-512, with VNNI and without. */
#define AVX2 "avx2,fma,f16c"
#ifndef AVX512 /* tests/parity/emulated.h computes the rest by AVX2 */
#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq," AVX2
#define AVX512_VNNI AVX512 ",avx512vnni"
#define AVX_VNNI AVX2 ",avxvnni"
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#endif
#define WIDE ",prefer-vector-width=512"

BEGIN_TARGET(AVX2, "")
#define ISA avx2
typedef struct { __m256 a, b; } V_avx2;
typedef struct { __m256i a, b; } I_avx2;
#define BOTH(x, y) (V_avx2){x, y}
INLINE V_avx2 zero_avx2(void) { return BOTH(_mm256_setzero_ps(), _mm256_setzero_ps()); }
INLINE V_avx2 set_avx2(float x) { return BOTH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE V_avx2 load_avx2(const float *p) { return BOTH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE V_avx2 once_avx2(V_avx2 v) { return v; }
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
INLINE __m256 table4_one_avx2(__m256i w, int j, const float *table) {
    __m256i index = _mm256_srli_epi32(w, 4 * j);
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(w, 28 - 4 * j)));
}
INLINE V_avx2 table4_avx2(I_avx2 w, int j, const float *table) {
    return BOTH(table4_one_avx2(w.a, j, table), table4_one_avx2(w.b, j, table));
}
INLINE __m256 signed6_one_avx2(__m256i low, int j, __m256i high, int k) {
    __m256i four = _mm256_and_si256(_mm256_srli_epi32(low, 4 * j), _mm256_set1_epi32(15));
    __m256i two = k < 2 ? _mm256_slli_epi32(high, 4 - 2 * k) : _mm256_srli_epi32(high, 2 * k - 4);
    __m256i six = _mm256_or_si256(four, _mm256_and_si256(two, _mm256_set1_epi32(48)));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(six, _mm256_set1_epi32(32)));
}
INLINE V_avx2 signed6_avx2(I_avx2 low, int j, I_avx2 high, int k) {
    return BOTH(signed6_one_avx2(low.a, j, high.a, k), signed6_one_avx2(low.b, j, high.b, k));
}
INLINE __m128 four_of_eight(__m256 eight) {
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
INLINE float total_of_four(__m128 four) {
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE __m128 totals_of_fours(__m128 a, __m128 b, __m128 c, __m128 d) {
    _MM_TRANSPOSE4_PS(a, b, c, d);
    return _mm_add_ps(_mm_add_ps(a, c), _mm_add_ps(b, d));
}
INLINE __m128 four_avx2(V_avx2 v) { return four_of_eight(_mm256_add_ps(v.a, v.b)); }
INLINE float total_avx2(V_avx2 v) { return total_of_four(four_avx2(v)); }
INLINE void totals_avx2(const V_avx2 *v, float scale, float *into) {
    __m128 totals = totals_of_fours(four_avx2(v[0]), four_avx2(v[1]), four_avx2(v[2]), four_avx2(v[3]));
    _mm_storeu_ps(into, _mm_mul_ps(totals, _mm_set1_ps(scale)));
}
#define TILES_ONE 2
#define TILES_MANY 1
#define ROW_TILE 4
#define MANY_ROWS 6
#define OUTPUTS 2
#define PANEL_OUTPUTS 1
#include "products.h"
#include "step.h"

#define BYTES avx2
typedef I_avx2 B_avx2;
typedef I_avx2 J_avx2;
INLINE __m256i nibbles_avx2(__m256i w) {
    return _mm256_and_si256(_mm256_xor_si256(w, _mm256_set1_epi8((char)0x88)), _mm256_set1_epi8(15));
}
INLINE B_avx2 low4_avx2(I_avx2 w) { return (B_avx2){nibbles_avx2(w.a), nibbles_avx2(w.b)}; }
INLINE B_avx2 high4_avx2(I_avx2 w) {
    return (B_avx2){nibbles_avx2(_mm256_srli_epi16(w.a, 4)), nibbles_avx2(_mm256_srli_epi16(w.b, 4))};
}
INLINE B_avx2 four8_avx2(const int8_t *p) {
    __m128i first = LOAD128(p), second = LOAD128(p + 16), third = LOAD128(p + 32), last = LOAD128(p + 48);
    __m128i a = _mm_unpacklo_epi8(first, second), b = _mm_unpackhi_epi8(first, second);
    __m128i c = _mm_unpacklo_epi8(third, last), d = _mm_unpackhi_epi8(third, last);
    return (B_avx2){_mm256_set_m128i(_mm_unpackhi_epi16(a, c), _mm_unpacklo_epi16(a, c)),
                    _mm256_set_m128i(_mm_unpackhi_epi16(b, d), _mm_unpacklo_epi16(b, d))};
}
INLINE J_avx2 none_avx2(void) { return (J_avx2){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
/* Sums of 16 bits: 8 products of two pairs, up to 15 * 127, fit. */
INLINE J_avx2 dot4_avx2(J_avx2 sum, B_avx2 w, int32_t four) {
    __m256i x = _mm256_set1_epi32(four);
    return (J_avx2){_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(w.a, x)),
                    _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(w.b, x))};
}
/* The weights' sign goes to x, so that the first factor is 0 .. 128 and no sum of two products overflows. */
INLINE __m256i pairs8_avx2(__m256i w, __m256i x) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1));
}
INLINE J_avx2 dot8_avx2(J_avx2 sum, B_avx2 w, int32_t four) {
    __m256i x = _mm256_set1_epi32(four);
    return (J_avx2){_mm256_add_epi32(sum.a, pairs8_avx2(w.a, x)), _mm256_add_epi32(sum.b, pairs8_avx2(w.b, x))};
}
INLINE V_avx2 whole8_avx2(J_avx2 sum, int32_t of_x) {
    (void)of_x;
    return BOTH(_mm256_cvtepi32_ps(sum.a), _mm256_cvtepi32_ps(sum.b));
}
INLINE V_avx2 whole4_avx2(J_avx2 sum) {
    const __m256i one = _mm256_set1_epi16(1);
    return whole8_avx2((J_avx2){_mm256_madd_epi16(sum.a, one), _mm256_madd_epi16(sum.b, one)}, 0);
}
#include "bytes.h"
END_TARGET

#if HAS_VNNI
BEGIN_TARGET(AVX_VNNI, "")
#define BYTES avxvnni
typedef I_avx2 B_avxvnni;
typedef I_avx2 J_avxvnni;
INLINE B_avxvnni low4_avxvnni(I_avx2 w) { return low4_avx2(w); }
INLINE B_avxvnni high4_avxvnni(I_avx2 w) { return high4_avx2(w); }
INLINE B_avxvnni four8_avxvnni(const int8_t *p) { /* 128 more, because the first factor has no sign */
    B_avx2 w = four8_avx2(p);
    const __m256i more = _mm256_set1_epi8((char)0x80);
    return (B_avxvnni){_mm256_xor_si256(w.a, more), _mm256_xor_si256(w.b, more)};
}
INLINE J_avxvnni none_avxvnni(void) { return none_avx2(); }
INLINE J_avxvnni dot8_avxvnni(J_avxvnni sum, B_avxvnni w, int32_t four) {
    __m256i x = _mm256_set1_epi32(four);
    return (J_avxvnni){_mm256_dpbusd_avx_epi32(sum.a, w.a, x), _mm256_dpbusd_avx_epi32(sum.b, w.b, x)};
}
INLINE J_avxvnni dot4_avxvnni(J_avxvnni sum, B_avxvnni w, int32_t four) { return dot8_avxvnni(sum, w, four); }
INLINE V_avx2 whole4_avxvnni(J_avxvnni sum) { return whole8_avx2(sum, 0); }
INLINE V_avx2 whole8_avxvnni(J_avxvnni sum, int32_t of_x) {
    const __m256i less = _mm256_set1_epi32(128 * of_x);
    return whole8_avx2((J_avx2){_mm256_sub_epi32(sum.a, less), _mm256_sub_epi32(sum.b, less)}, 0);
}
#include "bytes.h"
END_TARGET
#endif

BEGIN_TARGET(AVX512, WIDE)
#undef ISA
#undef TILES_ONE
#undef TILES_MANY
#undef ROW_TILE
#undef MANY_ROWS
#undef OUTPUTS
#undef PANEL_OUTPUTS
#define ISA avx512
typedef __m512 V_avx512;
typedef __m512i I_avx512;
#define LOAD256(p) _mm256_loadu_si256((const __m256i *)(p))
INLINE V_avx512 zero_avx512(void) { return _mm512_setzero_ps(); }
INLINE V_avx512 set_avx512(float x) { return _mm512_set1_ps(x); }
INLINE V_avx512 load_avx512(const float *p) { return _mm512_loadu_ps(p); }
/* Is not read from memory again where it is used twice, which takes as long as the products. */
INLINE V_avx512 once_avx512(V_avx512 v) {
    IN_REGISTER(v);
    return v;
}
INLINE void store_avx512(float *p, V_avx512 a) { _mm512_storeu_ps(p, a); }
INLINE V_avx512 mul_avx512(V_avx512 a, V_avx512 b) { return _mm512_mul_ps(a, b); }
INLINE V_avx512 add_avx512(V_avx512 a, V_avx512 b) { return _mm512_add_ps(a, b); }
INLINE V_avx512 fma_avx512(V_avx512 a, V_avx512 b, V_avx512 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V_avx512 half_avx512(const uint16_t *p) { return _mm512_cvtph_ps(LOAD256(p)); }
static const uint16_t TO_HIGH_HALVES[32] = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                                            0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
INLINE V_avx512 brain_avx512(const uint16_t *p) {
    const __m512i places = _mm512_loadu_si512(TO_HIGH_HALVES);
    return _mm512_castsi512_ps(
        _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, places, _mm512_castsi256_si512(LOAD256(p))));
}
INLINE V_avx512 bytes_avx512(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(LOAD128(p))); }
INLINE I_avx512 words_avx512(const uint32_t *p) { return _mm512_loadu_si512(p); }
/* The permutation looks at the low four bits of each lane alone. */
INLINE V_avx512 signed4_avx512(I_avx512 w, int j) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * j), _mm512_loadu_ps(SIGNED_TABLE));
}
INLINE V_avx512 table4_avx512(I_avx512 w, int j, const float *table) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * j), _mm512_loadu_ps(table));
}
INLINE V_avx512 signed6_avx512(I_avx512 low, int j, I_avx512 high, int k) {
    return _mm512_add_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(low, 4 * j), _mm512_loadu_ps(SIXTEEN_TABLE)),
                         _mm512_permutexvar_ps(_mm512_srli_epi32(high, 2 * k), _mm512_loadu_ps(HIGH_TABLE)));
}
INLINE __m128 four_avx512(V_avx512 v) {
    return four_of_eight(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
}
INLINE float total_avx512(V_avx512 v) { return total_of_four(four_avx512(v)); }
INLINE void totals_avx512(const V_avx512 *v, float scale, float *into) {
    __m128 totals = totals_of_fours(four_avx512(v[0]), four_avx512(v[1]), four_avx512(v[2]), four_avx512(v[3]));
    _mm_storeu_ps(into, _mm_mul_ps(totals, _mm_set1_ps(scale)));
}
#define TILES_ONE 4
#define TILES_MANY 2
#define ROW_TILE 8
#define MANY_ROWS 8
#define OUTPUTS 4
#define PANEL_OUTPUTS 4
#include "products.h"
#include "step.h"

#define BYTES avx512
typedef __m512i B_avx512;
typedef __m512i J_avx512;
INLINE B_avx512 low4_avx512(I_avx512 w) {
    return _mm512_and_si512(_mm512_xor_si512(w, _mm512_set1_epi8((char)0x88)), _mm512_set1_epi8(15));
}
INLINE B_avx512 high4_avx512(I_avx512 w) { return low4_avx512(_mm512_srli_epi16(w, 4)); }
/* Four bytes of each input into each quarter, then the four of an output side by side. */
INLINE B_avx512 four8_avx512(const int8_t *p) {
    const __m512i quarters = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(quarters, _mm512_loadu_si512(p)), bytes);
}
INLINE J_avx512 none_avx512(void) { return _mm512_setzero_si512(); }
INLINE J_avx512 dot4_avx512(J_avx512 sum, B_avx512 w, int32_t four) { /* sums of 16 bits, as with AVX2 */
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, _mm512_set1_epi32(four)));
}
INLINE J_avx512 dot8_avx512(J_avx512 sum, B_avx512 w, int32_t four) {
    __m512i x = _mm512_set1_epi32(four);
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), x);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
INLINE V_avx512 whole4_avx512(J_avx512 sum) {
    return _mm512_cvtepi32_ps(_mm512_madd_epi16(sum, _mm512_set1_epi16(1)));
}
INLINE V_avx512 whole8_avx512(J_avx512 sum, int32_t of_x) { (void)of_x; return _mm512_cvtepi32_ps(sum); }
#include "bytes.h"
END_TARGET

#if HAS_VNNI
BEGIN_TARGET(AVX512_VNNI, WIDE)
#define BYTES avx512vnni
typedef __m512i B_avx512vnni;
typedef __m512i J_avx512vnni;
INLINE B_avx512vnni low4_avx512vnni(I_avx512 w) { return low4_avx512(w); }
INLINE B_avx512vnni high4_avx512vnni(I_avx512 w) { return high4_avx512(w); }
INLINE B_avx512vnni four8_avx512vnni(const int8_t *p) { /* 128 more, because the first factor has no sign */
    return _mm512_xor_si512(four8_avx512(p), _mm512_set1_epi8((char)0x80));
}
INLINE J_avx512vnni none_avx512vnni(void) { return _mm512_setzero_si512(); }
INLINE J_avx512vnni dot8_avx512vnni(J_avx512vnni sum, B_avx512vnni w, int32_t four) {
    return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(four));
}
INLINE J_avx512vnni dot4_avx512vnni(J_avx512vnni sum, B_avx512vnni w, int32_t four) {
    return dot8_avx512vnni(sum, w, four);
}
INLINE V_avx512 whole4_avx512vnni(J_avx512vnni sum) { return _mm512_cvtepi32_ps(sum); }
INLINE V_avx512 whole8_avx512vnni(J_avx512vnni sum, int32_t of_x) {
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(128 * of_x)));
}
#include "bytes.h"
END_TARGET
#endif
