/* Vectors of 16 float32 and products of bytes by NEON, with the instructions for dot products and without. */
#define ISA neon
typedef struct { float32x4_t v[4]; } V_neon;
typedef struct { uint32x4_t v[4]; } I_neon;
INLINE V_neon set_neon(float x) { V_neon r; FOUR r.v[part] = vdupq_n_f32(x); return r; }
INLINE V_neon zero_neon(void) { return set_neon(0.0f); }
INLINE V_neon load_neon(const float *p) { V_neon r; FOUR r.v[part] = vld1q_f32(p + 4 * part); return r; }
INLINE V_neon once_neon(V_neon a) { return a; }
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
INLINE V_neon signed6_neon(I_neon low, int j, I_neon high, int k) {
    V_neon r;
    FOUR {
        uint32x4_t four = vandq_u32(vshlq_u32(low.v[part], vdupq_n_s32(-4 * j)), vdupq_n_u32(15));
        uint32x4_t two = vandq_u32(vshlq_u32(high.v[part], vdupq_n_s32(4 - 2 * k)), vdupq_n_u32(48));
        r.v[part] = vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(vorrq_u32(four, two)), vdupq_n_s32(32)));
    }
    return r;
}
INLINE V_neon table4_neon(I_neon w, int j, const float *values) {
    const uint8_t *bytes = (const uint8_t *)values;
    uint8x16x4_t table = {{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
    V_neon r;
    FOUR {
        uint32x4_t code = vandq_u32(vshlq_u32(w.v[part], vdupq_n_s32(-4 * j)), vdupq_n_u32(15));
        uint32x4_t places = vmlaq_n_u32(vdupq_n_u32(0x03020100u), code, 0x04040404u);
        r.v[part] = vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(places)));
    }
    return r;
}
INLINE float total_neon(V_neon a) { /* in the order of all the others */
    float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(vpadd_f32(two, two), 0);
}
INLINE void totals_neon(const V_neon *v, float scale, float *into) {
    for (int k = 0; k < 4; k++) into[k] = total_neon(v[k]) * scale;
}
#define TILES_ONE 2
#define TILES_MANY 1
#define ROW_TILE 4
#define MANY_ROWS 6
#define OUTPUTS 2
#define PANEL_OUTPUTS 1
#include "products.h"
#include "step.h"

#define BYTES neon
typedef struct { int8x16_t v[4]; } B_neon;
typedef struct { int32x4_t v[4]; } J_neon;
INLINE B_neon low4_neon(I_neon w) {
    B_neon r;
    FOUR {
        uint8x16_t codes = vandq_u8(veorq_u8(vreinterpretq_u8_u32(w.v[part]), vdupq_n_u8(0x88)), vdupq_n_u8(15));
        r.v[part] = vreinterpretq_s8_u8(codes);
    }
    return r;
}
INLINE B_neon high4_neon(I_neon w) { FOUR w.v[part] = vshrq_n_u32(w.v[part], 4); return low4_neon(w); }
INLINE B_neon four8_neon(const int8_t *p) {
    int8x16x2_t a = vzipq_s8(vld1q_s8(p), vld1q_s8(p + 16)), b = vzipq_s8(vld1q_s8(p + 32), vld1q_s8(p + 48));
    B_neon r;
    for (int half = 0; half < 2; half++) {
        int16x8x2_t both = vzipq_s16(vreinterpretq_s16_s8(a.val[half]), vreinterpretq_s16_s8(b.val[half]));
        r.v[2 * half] = vreinterpretq_s8_s16(both.val[0]);
        r.v[2 * half + 1] = vreinterpretq_s8_s16(both.val[1]);
    }
    return r;
}
INLINE J_neon none_neon(void) { J_neon r; FOUR r.v[part] = vdupq_n_s32(0); return r; }
INLINE J_neon dot8_neon(J_neon sum, B_neon w, int32_t four) { /* two products of up to 128 * 127 fit into 16 bits */
    int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
    FOUR {
        int16x8_t low = vmull_s8(vget_low_s8(w.v[part]), vget_low_s8(x));
        int16x8_t high = vmull_s8(vget_high_s8(w.v[part]), vget_high_s8(x));
        sum.v[part] = vpadalq_s16(sum.v[part], vpaddq_s16(low, high));
    }
    return sum;
}
INLINE J_neon dot4_neon(J_neon sum, B_neon w, int32_t four) { return dot8_neon(sum, w, four); }
INLINE V_neon whole4_neon(J_neon sum) { V_neon r; FOUR r.v[part] = vcvtq_f32_s32(sum.v[part]); return r; }
INLINE V_neon whole8_neon(J_neon sum, int32_t of_x) { (void)of_x; return whole4_neon(sum); }
#include "bytes.h"

#if defined(__clang__)
BEGIN_TARGET("dotprod", "")
#else
BEGIN_TARGET("arch=armv8.2-a+dotprod", "")
#endif
#define BYTES neondot
typedef B_neon B_neondot;
typedef J_neon J_neondot;
INLINE B_neondot low4_neondot(I_neon w) { return low4_neon(w); }
INLINE B_neondot high4_neondot(I_neon w) { return high4_neon(w); }
INLINE B_neondot four8_neondot(const int8_t *p) { return four8_neon(p); }
INLINE J_neondot none_neondot(void) { return none_neon(); }
INLINE J_neondot dot8_neondot(J_neondot sum, B_neondot w, int32_t four) {
    FOUR sum.v[part] = vdotq_s32(sum.v[part], w.v[part], vreinterpretq_s8_s32(vdupq_n_s32(four)));
    return sum;
}
INLINE J_neondot dot4_neondot(J_neondot sum, B_neondot w, int32_t four) { return dot8_neondot(sum, w, four); }
INLINE V_neon whole4_neondot(J_neondot sum) { return whole4_neon(sum); }
INLINE V_neon whole8_neondot(J_neondot sum, int32_t of_x) { (void)of_x; return whole4_neon(sum); }
#include "bytes.h"
END_TARGET
