/* Packing: finds the few numbers that float32 weights were made of, or says that they were not --- */

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
        uint16_t nearest = float_half((most - least) / (float)top);
        for (int step = -1; step <= 1; step++) {
            *scale = (uint16_t)(nearest + step);
            if (nearest + step < 0) continue;
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
        uint16_t nearest = float_half(largest / (float)top);
        for (int step = -1; step <= 1; step++) {
            if (nearest + step < 0) continue;
            *scale = (uint16_t)(nearest + step);
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

/* A block of 16 whose values are whole multiples, -127 .. 127, of a float32: GGUF's Q3_K, Q6_K and IQ4_XS. */
static int find_wide_multiples(const float *values, float *scale, int8_t *codes) {
    float smallest = 0.0f;
    for (int index = 0; index < 16; index++) {
        float size = values[index] < 0 ? -values[index] : values[index];
        if (!(size < 1e30f)) return 0;
        if (size > 0 && (smallest == 0.0f || size < smallest)) smallest = size;
    }
    for (int least = 1; least <= 127; least++) {
        *scale = smallest / (float)least;
        int index = 0;
        for (; index < 16; index++) {
            float code = smallest > 0 ? values[index] / *scale : 0.0f;
            if (!(code >= -127.5f && code <= 127.5f)) break;
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
