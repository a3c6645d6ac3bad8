/* Products of weight matrices with a few rows of float32 values, and a decode step of transformer blocks.
 *
 * Weights are multiplied in the form in which they are held; activations stay float32, so that results are exact to
 * rounding. No dependencies. Here are the forms, what each instruction set has to offer, and the functions that Python
 * calls. products.h, tiles.h, step.h, attention.h, latent.h and recurrent.h are included once for each instruction set, with ISA defined; `petalnode_select`
 * takes the best one that the processor has. plain.h, x86.h and arm.h have those, tiles.h products with packed weights,
 * bytes.h those of whole numbers for rows that are rounded, threads.h the threads that help, cache.h how keys and values
 * are held, ahead.h what is fetched early, pages.h files that are mapped, rotary.h cosines and sines, recurrent.h convolutions
 * and delta rules; packing.h brings weights of a GGUF file into these forms.
 *
 * Three promises hold for every function and every instruction set:
 *   - the result for a row does not depend on the rows beside it, to the bit: each result is summed in an order that
 *     follows from the shape of the matrix alone;
 *   - nor on the number of threads;
 *   - `unpack` gives to the bit the float32 values that the packed weights stand for.
 *
 * Packed forms hold 16 rows (outputs) side by side, one in each lane of a vector, in "tiles"; outputs behind the last
 * one are zero. Of a tile:
 *   4 bits:  [inputs / 8][16] uint32, input 8 i + j of a row in bits 4 j .. 4 j + 3;
 *   6 bits:  [inputs / 16][3][16] uint32, the low four bits of inputs 0 .. 7 and 8 .. 15, as above, then the high two bits
 *            of input j in bits 2 j and 2 j + 1;
 *   8 bits:  [inputs][16] int8;
 *   scales and offsets: [inputs / block][16] float16 or float32, one for each block of a row's inputs; or scales of scales:
 *            [inputs / 256] times float16 [16], the negative of another for offsets [16], and for each block int8 [16] that
 *            the first is multiplied with, and the second [16].
 * Forms of 16 and 32 bits are row-major, as checkpoints have them.
 */
#if defined(__linux__)
#define _GNU_SOURCE /* threads, beside C11 */
#endif

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif
#if defined(__clang__) || __GNUC__ >= 11
#define HAS_VNNI 1 /* has the compiler */
#else
#define HAS_VNNI 0
#endif
#define INLINE static inline __attribute__((always_inline, unused))

/* For the functions between, instructions that the compiler would not use otherwise; `more`: for gcc alone. */
#define PRAGMA2(text) _Pragma(#text)
#define PRAGMA(text) PRAGMA2(text)
#if defined(__clang__)
#define BEGIN_TARGET(list, more) PRAGMA(clang attribute push(__attribute__((target(list))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#else
#define BEGIN_TARGET(list, more) PRAGMA(GCC push_options) PRAGMA(GCC target(list more))
#define END_TARGET PRAGMA(GCC pop_options)
#endif

#define LANES 16
#define INTERFACE_VERSION 17 /* of this file towards library.py */
#define MOST_ROWS 8 /* that are multiplied at a time */
#define AHEAD 8 /* tokens, whose keys are fetched */
#define ATTENDED 16 /* query heads of some rows, that look at the same keys at a time */
#define PANEL 16 /* tokens, whose keys or values are opened at a time */
#define MOST_TILES 4 /* that are multiplied at a time */
#define GROUP (MOST_TILES * LANES) /* outputs in a piece of work */
#define PANEL_VALUES 4096 /* of tiles, opened, or of keys, that stay in the nearest cache for all rows */
#define OPENED_FROM 12 /* rows, for which they are opened; fewer take less time otherwise */
#define TOGETHER_OPENED 256 /* rows that they are opened for */
#define TOGETHER 32 /* rows that row-major weights are read once for */
#define TURNED 256 /* rows, at most, that these are turned for where there are more */
#define TURNED_VALUES 36864 /* weights that are turned at a time, and stay in the second cache for all rows */
#define SIDE_INPUTS 512 /* of x, side by side, that some rows are multiplied with at once */
#define PANEL_ROWS 16 /* of the matrix, whose part stays in the nearest cache for all rows of x */
#define VALUE_BYTES(form) ((form) == FORM_F32 ? 4 : 2)
#define GROUPS(matrix) (((matrix)->out + GROUP - 1) / GROUP)

enum form {
    FORM_F32 = 0,
    FORM_BF16 = 1,
    FORM_F16 = 2,
    FORM_Q4 = 3,       /* scale * code + offset, code 0 .. 15 held as code - 8; scale and offset float16 */
    FORM_Q4_HALF = 4,  /* scale * (code - 8); scale float16 */
    FORM_NF4 = 5,      /* scale * table[code]; scale float32 */
    FORM_Q4_K = 6,     /* as Q4, with scales of scales */
    FORM_Q3_K = 7,     /* as Q4_HALF, with scales of scales */
    FORM_Q8_PLAIN = 8, /* scale * code, code -128 .. 127; scale float32 */
    FORM_Q8_HALF = 9,  /* the same with float16 */
    FORM_F32_COLUMNS = 10, /* the transpose in float32; `block` is the length of its rows */
    FORM_Q6 = 11,      /* scale * code + offset, code -32 .. 31 held as code + 32; scale and offset float16 */
    FORM_Q6_HALF = 12, /* scale * code; scale float16 */
    FORM_Q5_K = 13,    /* as Q6, with scales of scales */
    FORM_Q6_K = 14,    /* as Q6_HALF, with scales of scales */
    FORM_IQ4_NL = 15,  /* scale * table[code]; scale float16 */
    FORM_IQ4_XS = 16,  /* the same with scales of scales */
    FORM_MXFP4 = 17,   /* the same with float32 */
    FORM_Q2_K = 18,    /* as Q4_K, in blocks of 16 */
};

#define SUPER 256 /* inputs that share the scale of their scales */
#define SUPER_SHIFT(block) ((block) == 16 ? 4 : 3) /* log2 of the blocks of these; divisions take longer than the products */
#define ONE_OF(forms, form) ((forms) >> (form) & 1u)
#define HALF_SCALES(form)                                                                                             \
    ONE_OF(1u << FORM_Q4 | 1u << FORM_Q4_HALF | 1u << FORM_Q8_HALF | 1u << FORM_Q6 | 1u << FORM_Q6_HALF |             \
           1u << FORM_IQ4_NL, form)
#define SUPER_SCALES(form)                                                                                            \
    ONE_OF(1u << FORM_Q4_K | 1u << FORM_Q3_K | 1u << FORM_Q5_K | 1u << FORM_Q6_K | 1u << FORM_IQ4_XS | 1u << FORM_Q2_K, form)
#define HAS_OFFSETS(form)                                                                                             \
    ONE_OF(1u << FORM_Q4 | 1u << FORM_Q4_K | 1u << FORM_Q6 | 1u << FORM_Q5_K | 1u << FORM_Q2_K, form)
#define FOUR_BITS(form)                                                                                               \
    ONE_OF(1u << FORM_Q4 | 1u << FORM_Q4_HALF | 1u << FORM_Q4_K | 1u << FORM_Q3_K | 1u << FORM_Q2_K, form)
#define SIX_BITS(form) ((form) >= FORM_Q6 && (form) <= FORM_Q6_K)
#define EIGHT_BITS(form) ((form) == FORM_Q8_PLAIN || (form) == FORM_Q8_HALF)

/* `rounds`: rows are rounded to 8 bits before they are multiplied (struct rounded). */
struct matrix {
    int32_t form, out, in, block;
    const void *codes, *scales, *offsets;
    const float *bias; /* [out], or NULL */
    int64_t rounds;
};

/* Rows [rows][in], each block of ROUND values of a row rounded to whole multiples, -127 .. 127, of its largest
 * magnitude / 127, as `round_rows` has it: scales [rows][in / ROUND], and their products with the sums of the codes
 * (`moved`, for offsets of weights); sums of the codes of 16 inputs each; the codes, and
 * in the order in which weights of 4 bits meet them (inputs 0, 2, 4, 6, 1, 3, 5, 7); and the values that they stand for,
 * with their `block_sums`. What no form of the matrices needs is not there. */
struct rounded {
    const float *values, *scales, *moved, *blocks;
    const int32_t *sums;
    const int8_t *codes4, *codes8;
};

#define ROUND 32 /* values of a row, key or value that share a scale */
#define SCRATCH_FLOATS(in) (3 * (in)) /* for each row of a product, rounded or turned */
#define BY_BYTES(m)                                                                                                   \
    ((m)->in % ROUND == 0 && (EIGHT_BITS((m)->form) || (FOUR_BITS((m)->form) && (m)->block == ROUND)))

/* One row of a batch: `memory` is its session's cache, for each block with attention keys, then values (or latents, then turned keys), each
 * [batch][kv_heads][max_length] of what is held; `length` tokens are held, those before `padding` are not looked at. `states`:
 * of each block with a delta rule what its convolution has seen last, [batch][channels][held], as it was before (NULL: zeros)
 * and as it is to be, then likewise the rule's state, [batch][heads][key_dim][value_dim]; and where what enters them is to be kept
 * (NULL: nowhere), [batch][tokens] of inputs of the convolution, of the keys and values that it gives, betas, and decays. */
struct row {
    uint8_t *memory;
    int64_t batch, row, max_length, length, padding;
    float *const *states;
};

/* Some bytes of a mapped file. */
struct range {
    const void *start;
    int64_t bytes;
};

#define PROJECTIONS 8
enum part { PART_QUERY, PART_KEY, PART_VALUE, PART_GATE, PART_BETA, PART_DECAY, PARTS_OF_DELTA };

/* Where the values of a part stand in a projection's outputs: `width` together, `pitch` apart, from `first` on. */
struct values {
    int32_t projection, first, width, pitch;
};

/* A gated delta rule in the place of attention. Projections are of the block's input, or of the outputs of one before them
 * (`of`, else -1); `gate`: the activation of what multiplies the rule's normed outputs; `most`: of betas. */
struct delta {
    int32_t projections, key_heads, heads, key_dim, value_dim, decays, taps, held, gate;
    float most, eps;
    int32_t of[PROJECTIONS];
    struct values parts[PARTS_OF_DELTA];
    struct matrix projection[PROJECTIONS];
    const float *taps_of, *bias, *rates, *moved, *norm; /* [channels][taps]; [heads], a logarithm; [heads][decays]; [value_dim] */
};

/* One block. What may be NULL, and then is not there: biases, norms of what enters attention and MLP and of what these give,
 * norms of queries and keys (with `whole` of all heads at once), the gate's codes. With `experts`, gate, up and down are those of an expert that all tokens share, or not there.
 * `sinks`: of each head, a score beside those of the tokens; `favours`: of each expert, what is added before experts are
 * chosen, and not to their shares; `shared`: what decides by how much the shared one counts. `delta`: there is no attention.
 * `query` has a gate behind the values of each head if it has twice as many outputs as `output` has inputs. With latents
 * (latent.h) `key` gives a row's latent, whose norm is `key_norm`, and its turned key, and there is no `value`; with `low`,
 * `query` gets what that gives, through `query_norm`. */
struct block {
    const float *input_norm, *input_bias, *output_norm, *output_bias, *query_norm, *key_norm, *attention_norm, *mlp_norm;
    const float *sinks, *favours, *shared;
    const struct delta *delta;
    int64_t window, whole;   /* tokens that are looked at, 0: all */
    int32_t rotary, experts; /* which of the tables of cosines and sines; how many */
    float scale;             /* of the scores of attention */
    int32_t each;            /* ranges of an expert */
    int32_t turned;          /* the first ones of `latent` are [values of a query][latent], and are multiplied from the other side */
    struct matrix query, key, value, output, gate, up, down, router, low;
    const struct matrix *latent; /* [heads][2]: through which queries meet latents, and what makes values of these */
    const struct matrix *expert; /* [experts][3]: gate, up, down; no `up`: the gate's outputs are both in turns */
    const struct range *ranges;  /* [experts][each]: where these stand in mapped files; NULL: in memory */
};

enum activation { ACTIVATION_NONE = 0, ACTIVATION_SILU = 1, ACTIVATION_GELU_TANH = 2, ACTIVATION_LOGISTIC = 3 };

/* What an expert's share is: the router's softmax, or that of the chosen ones alone, or a logistic function of its output. */
enum routing { ROUTING_SOFTMAX = 0, ROUTING_CHOSEN = 1, ROUTING_SIGMOID = 2 };

/* Where the two values stand that are turned together: half a head apart; side by side; or side by side before, apart then. */
enum pairs { PAIRS_APART = 0, PAIRS_BESIDE = 1, PAIRS_PARTED = 2 };

/* `inner`: the most outputs of a gate; `chosen`: experts of a token, whose shares are made to add up to one or not, of
 * `kept` of `groups` of experts; `held`: enum held; `mixing`: float32 that a delta rule
 * needs for a row, `mixed`: values that it gives; `latent`: values of a latent, 0: there are none; `low`: the most outputs of
 * `low` of a block. */
struct shape {
    int32_t hidden, heads, kv_heads, head_dim, value_dim, inner, rotary_dim, activation, chosen, shares_add_up, held;
    int32_t routing, groups, kept, mixing, mixed, pairs, latent, low;
    float eps, latent_eps, softcap; /* 0: none */
    float routed_scale, alpha, limit; /* of the shares; of the activation of experts without `up` */
};

#define MOST_TAPS 16
#define MOST_KEY_DIM 256
#define WORTH_THREADS (1 << 17) /* products, for which helpers are woken */
#define COLUMNS (2 * LANES) /* of a state, that are computed at once */

/* A causal convolution of each channel by itself: x [rows][channels][tokens] behind `state` [rows][channels][held], of which
 * the newest stand last and which takes x in (NULL: behind zeros), with `weight` [channels][taps] and `bias` [channels] or
 * NULL; y [rows][tokens][channels]. `held`: `taps` - 1 at least. */
struct convolution {
    const float *x, *weight, *bias;
    float *state, *y;
    int64_t rows, channels, tokens, taps, held, silu;
};

/* The gated delta rule (Yang et al. 2024): `state` [rows][heads][key_dim][value_dim] in place, `query` and `key`
 * [rows][tokens][key_heads][key_dim], `value` and `out` [rows][tokens][heads][value_dim], `beta` [rows][tokens][heads], and
 * `decay`, in its logarithm, likewise; of each of `decays` values of a key by itself, if these are more than one. `normed`:
 * queries and keys are brought to a length of one. From one token to the next it is `key_pitch` and `value_pitch` values. */
struct delta_rule {
    const float *query, *key, *value, *decay, *beta;
    float *state, *out;
    int64_t rows, tokens, heads, key_heads, key_dim, value_dim, decays, normed, key_pitch, value_pitch;
};

#define LARGEST __builtin_inff()
#define MOST_CHOSEN 64 /* experts of a token, or groups */

enum layer { LAYER_QUERY, LAYER_KEY, LAYER_VALUE, LAYER_OUTPUT, LAYER_GATE, LAYER_UP, LAYER_DOWN };

/* LoRA (Hu et al. 2021) of one layer for rows `first` .. `first + rows - 1`: float32 matrices, factors included. */
struct change {
    int32_t block, layer;
    int64_t first, rows;
    struct matrix down, up;
};

/* One token of each row through the blocks: `hidden` [number][hidden] in place, keys and values into the rows' caches.
 * `several`: so many rows at a time are tokens of a session that follow each other, each with its own `length`; 0: none are.
 * `cosines`, `sines` [tables][number][rotary_dim]. `changes` in the order of their blocks. `scratch`: what
 * petalnode_step_scratch says, `score_count` for each thread. To `counts` is added how many experts of the blocks were used,
 * and how many of these were not all in memory. */
struct step {
    const struct shape *shape;
    const struct block *blocks;
    const struct row *rows;
    const struct change *changes;
    int64_t count, number, changed, score_count, several;
    const float *cosines, *sines;
    float *hidden, *scratch;
    int64_t *counts;
};

static const float NF4_TABLE[LANES] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};
static const float IQ4_TABLE[LANES] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const float MXFP4_TABLE[LANES] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
static const float SIXTEEN_TABLE[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const float HIGH_TABLE[LANES] = {-32, -16, 0, 16, -32, -16, 0, 16, -32, -16, 0, 16, -32, -16, 0, 16};
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

/* Within what `power` takes; NaN stays. */
INLINE float bounded(float x) {
    x = x < -87.0f ? -87.0f : x;
    return x > 88.0f ? 88.0f : x;
}

/* e^x to about two units in the last place. */
INLINE float power(float x) {
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

INLINE float exponential(float x) { return power(bounded(x)); }

/* The same of `count` values, in place. Two loops, of which compilers make vectors: in one they branch at the bounds. */
INLINE void exponentials(float *x, int64_t count) {
    for (int64_t index = 0; index < count; index++) x[index] = bounded(x[index]);
    for (int64_t index = 0; index < count; index++) x[index] = power(x[index]);
}

/* ln(1 + x) of 0 .. 2^126, to 1e-7 of it or to 1e-15. */
INLINE float logarithm_of_more(float x) {
    static const double shares[] = {1 / 21., 1 / 19., 1 / 17., 1 / 15., 1 / 13., 1 / 11., 1 / 9., 1 / 7., 1 / 5., 1 / 3., 1.};
    const double more = 1.0 + x;
    uint64_t bits;
    memcpy(&bits, &more, 8);
    const int64_t turns = (int64_t)(bits >> 52) - 1023;
    bits -= (uint64_t)turns << 52;
    double fraction, sum = 0.0;
    memcpy(&fraction, &bits, 8); /* 1 .. 2 */
    const double ratio = (fraction - 1.0) / (fraction + 1.0), square = ratio * ratio;
    for (int term = 0; term < 11; term++) sum = sum * square + shares[term];
    return (float)(2.0 * ratio * sum + (double)turns * 0.69314718055994530942);
}

/* tanh x of e^2x, to about 1e-7 of the whole range. */
INLINE float tangent_of(float power) { return 1.0f - 2.0f / (power + 1.0f); }

INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

#include "threads.h"
#include "cache.h"
#include "ahead.h"
#include "pages.h"
#include "rotary.h"

struct kernels {
    const char *name;
    void (*multiply)(const struct matrix *, const float *x, int64_t rows, float *y, float *scratch, int64_t threads);
    void (*unpack)(const struct matrix *, int64_t first, int64_t last, float *panel);
    void (*step)(const struct step *, int64_t threads);
    void (*convolve)(const struct convolution *, int64_t threads);
    void (*delta)(const struct delta_rule *, int64_t threads);
    void (*multiply_bytes)(const struct matrix *, int64_t tile, int64_t end, const struct rounded *, int64_t rows, float *y);
};

static const struct kernels *chosen;

struct choice {
    int64_t rows, tiles;
    void (*many)(const struct matrix *, int64_t tile, const float *x, const float *sums, float *y, const struct matrix *next);
    void (*one)(const struct matrix *, int64_t tile, const float *x, const float *sums, float *y, const struct matrix *next);
};

/* Some inputs of `tiles` tiles, opened for many rows: codes [inputs][tiles][LANES], and of each block scales and offsets
 * [blocks][tiles][LANES]. `goes_on`: they are a part of a block, its last one if it `ends`. */
struct panel {
    int64_t tiles, block, blocks;
    int32_t offset, goes_on, ends;
    __attribute__((aligned(64))) float codes[PANEL_VALUES], scales[PANEL_VALUES / LANES], offsets[PANEL_VALUES / LANES];
};

typedef void panel_work(const struct panel *, const float *x, int64_t in, const float *sums, float *totals);

struct byte_choice {
    int64_t rows, tiles;
    void (*many)(const struct matrix *, int64_t tile, const struct rounded *, int64_t row, float *y);
    void (*one)(const struct matrix *, int64_t tile, const struct rounded *, int64_t row, float *y);
};

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define NAME(name) JOIN(name, ISA)
#define OWN(name) JOIN(name, BYTES)
#define V NAME(V)
#define I NAME(I)
#define STRING2(text) #text
#define STRING(text) STRING2(text)

/* --- what each instruction set has to offer: vectors of 16 float32, and products of bytes (bytes.h) --- */

/* Loops over the registers of a tile are unrolled, or the tile would not be kept in registers. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

typedef float four_floats __attribute__((vector_size(16)));
typedef int32_t four_ints __attribute__((vector_size(16)));
typedef uint32_t four_words __attribute__((vector_size(16)));
typedef int8_t sixteen_bytes __attribute__((vector_size(16)));
typedef int16_t eight_shorts __attribute__((vector_size(16)));
#if defined(__clang__)
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif
/* Four values from `lane` on of each of four rows, turned: the first ones side by side, `pitch` behind them the second ones. */
INLINE void turn_four(const float *const *row, int64_t lane, float *into, int64_t pitch) {
    four_ints r[4];
    UNROLL for (int j = 0; j < 4; j++) memcpy(r + j, row[j] + lane, sizeof r[j]);
    const four_ints a = SHUFFLE(four_ints, r[0], r[1], 0, 4, 1, 5), b = SHUFFLE(four_ints, r[2], r[3], 0, 4, 1, 5);
    const four_ints c = SHUFFLE(four_ints, r[0], r[1], 2, 6, 3, 7), d = SHUFFLE(four_ints, r[2], r[3], 2, 6, 3, 7);
    r[0] = SHUFFLE(four_ints, a, b, 0, 1, 4, 5), r[1] = SHUFFLE(four_ints, a, b, 2, 3, 6, 7);
    r[2] = SHUFFLE(four_ints, c, d, 0, 1, 4, 5), r[3] = SHUFFLE(four_ints, c, d, 2, 3, 6, 7);
    UNROLL for (int j = 0; j < 4; j++) memcpy(into + j * pitch, r + j, sizeof r[j]);
}

#define EACH for (int lane = 0; lane < LANES; lane++)
#define FOUR UNROLL for (int part = 0; part < 4; part++)
#define AS_FLOATS(ints) __builtin_convertvector(ints, four_floats)

/* a * b + c with one rounding, without instructions for it. The product is exact in double. Their sum, rounded to float32, is
 * right unless it lies in the middle between two of these and is itself rounded, or is a subnormal one: then the odd one of the
 * two doubles around the sum is taken, whose rounding is that of the sum (Boldo & Melquiond 2008, theorem 4). */
INLINE float fused_one(float a, float b, float c) {
    const double product = (double)a * b, sum = product + c;
    uint64_t bits;
    memcpy(&bits, &sum, 8);
    if ((bits & 0x1fffffffu) != 0x10000000u && (bits << 1) >= (uint64_t)897 << 53) return (float)sum;
    const double back = sum - product, lost = (product - (sum - back)) + (c - back); /* Knuth's TwoSum: to the bit */
    if (!(bits & 1) && (lost > 0 || lost < 0)) bits += (lost > 0) == (sum > 0) ? 1 : -1; /* NaN is neither */
    double odd;
    memcpy(&odd, &bits, 8);
    return (float)odd;
}

#define ISA plain
#define FUSED 0
#include "plain.h"
#undef FUSED
#define ISA plainfma
#define FUSED 1
#include "plain.h"
#if defined(__x86_64__)
#include "x86.h"
#elif defined(__aarch64__)
#include "arm.h"
#endif

/* --- choice of instruction set --- */

static const struct kernels *chosen = &kernels_plain; /* until petalnode_select */

#if defined(__x86_64__)
/* By the processor's own word: `__builtin_cpu_supports` takes a table that a compiler's library fills, and zig's does not. */
enum { HAS_AVX2 = 1, HAS_AVX512 = 2, HAS_AVX_VNNI = 4, HAS_AVX512_VNNI = 8 };

static unsigned leaf(unsigned number, unsigned part, int of) { /* of: 0 .. 3 for eax, ebx, ecx, edx; 0 if there is none */
    unsigned r[4];
    return __get_cpuid_count(number, part, r, r + 1, r + 2, r + 3) ? r[of] : 0;
}

static int instructions(void) {
    const unsigned features = leaf(1, 0, 2), more = leaf(7, 0, 1);
    unsigned saved = 0, high; /* what the system keeps of registers when it changes threads */
    if (features >> 27 & 1) __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    const unsigned fma_half = 1u << 12 | 1u << 29, wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    if ((saved & 6) != 6 || (features & fma_half) != fma_half || !(more >> 5 & 1)) return 0;
    int found = HAS_AVX2 | (leaf(7, 0, 0) >= 1 && leaf(7, 1, 0) >> 4 & 1 ? HAS_AVX_VNNI : 0);
    if ((saved & 0xe6) == 0xe6 && (more & wide) == wide)
        found |= HAS_AVX512 | (leaf(7, 0, 2) >> 11 & 1 ? HAS_AVX512_VNNI : 0);
    return found;
}
#elif defined(__aarch64__)
static int has_dot(void) {
#if defined(__APPLE__)
    return 1; /* all of Apple's own processors have it */
#elif defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 0;
#endif
}
#endif

static int available(const char *name) {
    if (!strncmp(name, "plain", 5)) return 1;
#if defined(__x86_64__)
    const int found = instructions();
    if (!strcmp(name, "avx2")) return found & HAS_AVX2;
    if (!strcmp(name, "avx512")) return found & HAS_AVX512;
#if HAS_VNNI
    if (!strcmp(name, "avxvnni")) return found & HAS_AVX_VNNI;
    if (!strcmp(name, "avx512vnni")) return found & HAS_AVX512_VNNI;
#endif
#elif defined(__aarch64__)
    if (!strcmp(name, "neon")) return 1;
    if (!strcmp(name, "neondot")) return has_dot();
#endif
    return 0;
}

/* Takes the kernels of this name, or with NULL the best; returns the name of what is in use now, NULL if there are no
 * such kernels here. Not while others compute. */
EXPORT const char *petalnode_select(const char *name) {
    static const struct kernels *const all[] = {
#if defined(__x86_64__)
#if HAS_VNNI
        &kernels_avx512vnni, &kernels_avx512, &kernels_avxvnni, &kernels_avx2,
#else
        &kernels_avx512, &kernels_avx2,
#endif
#elif defined(__aarch64__)
        &kernels_neondot, &kernels_neon,
#endif
        &kernels_plain, &kernels_plainfma, /* plainfma only by name */
    };
    for (unsigned index = 0; index < sizeof all / sizeof *all; index++)
        if ((!name || !strcmp(name, all[index]->name)) && available(all[index]->name)) {
            chosen = all[index];
            say_lost_pages();
            return chosen->name;
        }
    return NULL;
}

EXPORT int32_t petalnode_interface(void) { return INTERFACE_VERSION; }

/* Bytes of the structures that callers fill, in the order of library.py's STRUCTURES; 0 beyond the last one. */
EXPORT int64_t petalnode_size(int32_t number) {
    static const int64_t sizes[] = {
        sizeof(struct matrix), sizeof(struct row), sizeof(struct block),
        sizeof(struct shape), sizeof(struct change), sizeof(struct step), sizeof(struct range),
        sizeof(struct convolution), sizeof(struct delta_rule), sizeof(struct delta),
    };
    return number >= 0 && number < (int32_t)(sizeof sizes / sizeof *sizes) ? sizes[number] : 0;
}

/* y [rows][out] = x [rows][in] times the transpose of the matrix, plus its bias. `scratch`:
 * rows * SCRATCH_FLOATS(in) float32. */
EXPORT void petalnode_multiply(const struct matrix *matrix, const float *x, int64_t rows, float *y, float *scratch,
                               int64_t threads) {
    threads = claim_threads(threads);
    chosen->multiply(matrix, x, rows, y, scratch, threads);
    release_threads(threads);
}

/* Rows 16 first .. 16 last - 1 of the matrix as float32, transposed: panel [in][16 (last - first)]. */
EXPORT void petalnode_unpack(const struct matrix *matrix, int64_t first, int64_t last, float *panel) {
    chosen->unpack(matrix, first, last, panel);
}

/* As `ask_for`. */
EXPORT int32_t petalnode_ask_for(const struct range *ranges, int64_t count) { return ask_for(ranges, count); }

EXPORT void petalnode_step(const struct step *step, int64_t threads) {
    threads = claim_threads(threads);
    chosen->step(step, threads);
    release_threads(threads);
}

/* What is worth it to wake other threads for. */
static int64_t claim_for(int64_t products, int64_t threads) { return claim_threads(products < WORTH_THREADS ? 1 : threads); }

/* False, and nothing is computed, if there are too many taps. */
EXPORT int32_t petalnode_convolve(const struct convolution *c, int64_t threads) {
    if (c->taps > MOST_TAPS || (c->state && c->held < c->taps - 1)) return 0;
    threads = claim_for(c->rows * c->channels * c->tokens * c->taps, threads);
    chosen->convolve(c, threads);
    release_threads(threads);
    return 1;
}

/* False, and nothing is computed, if keys are too long, or do not serve equally many heads. */
EXPORT int32_t petalnode_delta(const struct delta_rule *d, int64_t threads) {
    if (d->key_dim > MOST_KEY_DIM || d->heads % d->key_heads) return 0;
    threads = claim_for(d->rows * d->tokens * d->heads * d->key_dim * d->value_dim, threads);
    chosen->delta(d, threads);
    release_threads(threads);
    return 1;
}

/* float32 of a step's scratch, of which each of `threads` has `score_count` and a panel at the end. */
EXPORT int64_t petalnode_step_scratch(const struct shape *s, int64_t rows, int64_t score_count, int64_t threads) {
    const struct widths w = widths_of(s);
    int64_t values = 2 * s->hidden + 2 * w.wide + 2 * w.narrow + 2 * s->inner + w.latents + s->low + SCRATCH_FLOATS(w.most) + s->mixing + 1;
    return rows * values + threads * own_count(s, score_count);
}

#include "packing.h"
#include "vectors.h"
