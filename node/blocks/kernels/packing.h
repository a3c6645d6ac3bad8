/* Packing: weights as a GGUF file has them, brought into tiles. Each stands for the same value, to the bit. --- */

/* What a row's inputs of a unit become: SUPER of a kind whose scales have scales, 32 of the others. Codes are what is held,
 * but for the 8 or 32 that are added to those that count from there. */
struct unit {
    uint8_t codes[SUPER];
    float wide;            /* the scale, where it is float32 */
    uint16_t scale, offset; /* float16: of the unit, or of its scales */
    int8_t scales[SUPER / 16], offsets[SUPER / 16];
};

/* As `GGMLQuantizationType` counts them. */
enum stored {
    STORED_Q4_0 = 2, STORED_Q4_1 = 3, STORED_Q5_0 = 6, STORED_Q5_1 = 7, STORED_Q8_0 = 8, STORED_Q2_K = 10,
    STORED_Q3_K = 11, STORED_Q4_K = 12, STORED_Q5_K = 13, STORED_Q6_K = 14, STORED_IQ4_NL = 20, STORED_IQ4_XS = 23, STORED_MXFP4 = 39,
};

/* A kind: its form, inputs of a unit, bytes that these have in the file, and inputs that share a scale. */
struct stored_kind { int32_t kind, form, inputs, bytes, block; };
static const struct stored_kind STORED_KINDS[] = {
    {STORED_Q4_0, FORM_Q4_HALF, 32, 18, 32},  {STORED_Q4_1, FORM_Q4, 32, 20, 32},       {STORED_Q5_0, FORM_Q6_HALF, 32, 22, 32},
    {STORED_Q5_1, FORM_Q6, 32, 24, 32},       {STORED_Q8_0, FORM_Q8_HALF, 32, 34, 32},  {STORED_Q3_K, FORM_Q3_K, 256, 110, 16},
    {STORED_Q4_K, FORM_Q4_K, 256, 144, 32},   {STORED_Q5_K, FORM_Q5_K, 256, 176, 32},   {STORED_Q6_K, FORM_Q6_K, 256, 210, 16},
    {STORED_IQ4_NL, FORM_IQ4_NL, 32, 18, 32}, {STORED_IQ4_XS, FORM_IQ4_XS, 256, 136, 32}, {STORED_MXFP4, FORM_MXFP4, 32, 17, 32},
    {STORED_Q2_K, FORM_Q2_K, 256, 84, 16},
};

static uint16_t two_bytes(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

/* `count` bytes as 2 * `count` codes of 4 bits: first the low halves, then the high ones. */
INLINE void halves(const uint8_t *from, int count, uint8_t *codes) {
    for (int j = 0; j < count; j++) codes[j] = from[j] & 15;
    for (int j = 0; j < count; j++) codes[count + j] = from[j] >> 4;
}

/* The scales and offsets of Q4_K and Q5_K: eight of six bits each in twelve bytes. */
static void six_bit_scales(const uint8_t *from, struct unit *unit) {
    for (int j = 0; j < 8; j++) {
        unit->scales[j] = (int8_t)(j < 4 ? from[j] & 63 : (from[j + 4] & 15) | (from[j - 4] >> 6) << 4);
        unit->offsets[j] = (int8_t)(j < 4 ? from[j + 4] & 63 : from[j + 4] >> 4 | (from[j] >> 6) << 4);
    }
    unit->offset ^= 0x8000u; /* what is taken away */
}

/* Code `k` of the two bits of Q2_K and Q3_K. */
INLINE int two_bits(const uint8_t *from, int k) { return from[k / 128 * 32 + k % 32] >> 2 * (k % 128 / 32) & 3; }

static void read_q2(const uint8_t *from, struct unit *unit) {
    unit->scale = two_bytes(from + 80);
    unit->offset = two_bytes(from + 82) ^ 0x8000u; /* what is taken away */
    for (int j = 0; j < 16; j++) unit->scales[j] = (int8_t)(from[j] & 15), unit->offsets[j] = (int8_t)(from[j] >> 4);
    for (int k = 0; k < SUPER; k++) unit->codes[k] = (uint8_t)two_bits(from + 16, k);
}

static void read_q3(const uint8_t *from, struct unit *unit) {
    const uint8_t *high = from, *low = from + 32, *scales = from + 96;
    unit->scale = two_bytes(from + 108);
    for (int j = 0; j < 16; j++) {
        int least = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4;
        unit->scales[j] = (int8_t)((least | (scales[8 + j % 4] >> 2 * (j / 4) & 3) << 4) - 32);
    }
    for (int k = 0; k < SUPER; k++) /* the code less 4, to which 8 are added */
        unit->codes[k] = (uint8_t)(two_bits(low, k) + (high[k % 32] >> k / 32 & 1) * 4 + 4);
}

static void read_q5(const uint8_t *from, struct unit *unit) {
    const uint8_t *high = from + 16, *low = from + 48;
    for (int part = 0; part < 4; part++)
        for (int j = 0; j < 32; j++) {
            unit->codes[64 * part + j] = (uint8_t)(32 + (low[32 * part + j] & 15) + (high[j] >> 2 * part & 1) * 16);
            unit->codes[64 * part + 32 + j] = (uint8_t)(32 + (low[32 * part + j] >> 4) + (high[j] >> (2 * part + 1) & 1) * 16);
        }
}

static void read_q6(const uint8_t *from, struct unit *unit) {
    memcpy(unit->scales, from + 192, 16);
    unit->scale = two_bytes(from + 208);
    for (int part = 0; part < 2; part++) {
        const uint8_t *low = from + 64 * part, *high = from + 128 + 32 * part;
        uint8_t *codes = unit->codes + 128 * part;
        for (int j = 0; j < 32; j++) {
            codes[j] = (uint8_t)((low[j] & 15) | (high[j] & 3) << 4);
            codes[j + 32] = (uint8_t)((low[j + 32] & 15) | (high[j] >> 2 & 3) << 4);
            codes[j + 64] = (uint8_t)(low[j] >> 4 | (high[j] >> 4 & 3) << 4);
            codes[j + 96] = (uint8_t)(low[j + 32] >> 4 | (high[j] >> 6) << 4);
        }
    }
}

static void read_iq4_xs(const uint8_t *from, struct unit *unit) {
    const int high = two_bytes(from + 2);
    for (int j = 0; j < 8; j++) {
        unit->scales[j] = (int8_t)(((from[4 + j / 2] >> 4 * (j % 2) & 15) | (high >> 2 * j & 3) << 4) - 32);
        halves(from + 8 + 16 * j, 16, unit->codes + 32 * j);
    }
}

static void read_unit(int kind, const uint8_t *from, struct unit *unit) {
    unit->scale = two_bytes(from);
    unit->offset = two_bytes(from + 2);
    uint32_t fifth;
    switch (kind) {
    case STORED_Q4_0: case STORED_IQ4_NL: halves(from + 2, 16, unit->codes); break;
    case STORED_Q4_1: halves(from + 4, 16, unit->codes); break;
    case STORED_Q5_0: case STORED_Q5_1:
        from += kind == STORED_Q5_0 ? 2 : 4;
        memcpy(&fifth, from, 4);
        halves(from + 4, 16, unit->codes);
        for (int j = 0; j < 32; j++)
            unit->codes[j] = (uint8_t)(unit->codes[j] + (fifth >> j & 1) * 16 + (kind == STORED_Q5_0 ? 16 : 32));
        break;
    case STORED_Q8_0: memcpy(unit->codes, from + 2, 32); break;
    case STORED_Q2_K: read_q2(from, unit); break;
    case STORED_Q3_K: read_q3(from, unit); break;
    case STORED_Q4_K:
        six_bit_scales(from + 4, unit);
        for (int part = 0; part < 4; part++) halves(from + 16 + 32 * part, 32, unit->codes + 64 * part);
        break;
    case STORED_Q5_K:
        six_bit_scales(from + 4, unit);
        read_q5(from, unit);
        break;
    case STORED_Q6_K: read_q6(from, unit); break;
    case STORED_IQ4_XS: read_iq4_xs(from, unit); break;
    case STORED_MXFP4: /* half of 2 to the power of this byte less 127, since the table has twice the values */
        unit->wide = from[0] < 2 ? bits_float(0x00200000u << from[0]) : bits_float((uint32_t)(from[0] - 1) << 23);
        halves(from + 1, 16, unit->codes);
    }
}

/* Eight codes of 4 bits, a byte each, side by side. */
INLINE uint32_t eight_codes(const uint8_t *codes) {
    uint64_t all;
    memcpy(&all, codes, 8);
    all &= 0x0f0f0f0f0f0f0f0full;
    all = (all | all >> 4) & 0x00ff00ff00ff00ffull;
    all = (all | all >> 8) & 0x0000ffff0000ffffull;
    return (uint32_t)(all | all >> 16);
}

/* The codes of `count` inputs from `input` on of one row of a tile. */
static void put_codes(int form, const struct unit *unit, int count, int64_t input, void *tile, int64_t lane) {
    if (EIGHT_BITS(form)) {
        int8_t *codes = (int8_t *)tile + input * LANES + lane;
        for (int k = 0; k < count; k++) codes[k * LANES] = (int8_t)unit->codes[k];
    } else if (SIX_BITS(form)) {
        uint32_t *words = (uint32_t *)tile + input / 16 * 3 * LANES + lane;
        for (int k = 0; k < count; k += 16, words += 3 * LANES) {
            uint32_t high = 0;
            for (int j = 0; j < 16; j++) high |= (uint32_t)(unit->codes[k + j] >> 4) << 2 * j;
            words[0] = eight_codes(unit->codes + k);
            words[LANES] = eight_codes(unit->codes + k + 8);
            words[2 * LANES] = high;
        }
    } else {
        uint32_t *words = (uint32_t *)tile + input / 8 * LANES + lane;
        const uint32_t eighths = FOUR_BITS(form) ? 0x88888888u : 0; /* codes less 8, but for those that are looked up */
        for (int k = 0; k < count; k += 8) words[k / 8 * LANES] = eight_codes(unit->codes + k) ^ eighths;
    }
}

static void put_scales(const struct stored_kind *of, const struct unit *unit, int64_t number, int64_t lane, void *scales,
                       void *offsets) {
    const int offset = HAS_OFFSETS(of->form);
    if (SUPER_SCALES(of->form)) {
        int8_t *super = (int8_t *)scales + number * super_bytes(of->form, of->block);
        ((uint16_t *)super)[lane] = unit->scale;
        if (offset) ((uint16_t *)super)[LANES + lane] = unit->offset;
        super += (offset ? 4 : 2) * LANES + lane;
        for (int block = 0; block < SUPER / of->block; block++, super += (offset ? 2 : 1) * LANES) {
            super[0] = unit->scales[block];
            if (offset) super[LANES] = unit->offsets[block];
        }
        return;
    }
    const int64_t place = number * LANES + lane;
    if (HALF_SCALES(of->form)) ((uint16_t *)scales)[place] = unit->scale;
    else ((float *)scales)[place] = unit->wide;
    if (offset) ((uint16_t *)offsets)[place] = unit->offset;
}

/* Brings `out` rows of `in` weights of a kind, one behind the other, into tiles. What is written to is zeroed before.
 * Returns the form, or 0 for a kind or row that there is none for. */
EXPORT int32_t petalnode_pack(int32_t kind, const uint8_t *rows, int64_t out, int64_t in, void *codes, void *scales,
                              void *offsets) {
    const struct stored_kind *of = STORED_KINDS;
    while (of->kind != kind)
        if (++of == STORED_KINDS + sizeof STORED_KINDS / sizeof *STORED_KINDS) return 0;
    if (in % of->inputs) return 0;
    const int64_t units = in / of->inputs, bits = EIGHT_BITS(of->form) ? 8 : SIX_BITS(of->form) ? 6 : 4;
    const int64_t tile_codes = in * LANES * bits / 8, of_tile = tile_scales(of->form, of->block, in / of->block);
    struct unit unit;
    for (int64_t row = 0; row < out; row++) {
        const int64_t tile = row / LANES, lane = row % LANES;
        for (int64_t number = 0; number < units; number++, rows += of->bytes) {
            read_unit(kind, rows, &unit);
            put_codes(of->form, &unit, of->inputs, number * of->inputs, (char *)codes + tile * tile_codes, lane);
            put_scales(of, &unit, number, lane, (char *)scales + tile * of_tile, offsets ? (char *)offsets + tile * of_tile : NULL);
        }
    }
    return of->form;
}

/* NF4 codes [out][in / 2], two to a byte with the first in the high half, into tiles. `codes` is zeroed before. */
EXPORT void petalnode_tile_nf4(const uint8_t *pairs, int64_t out, int64_t in, uint32_t *codes) {
    for (int64_t row = 0; row < out; row++)
        for (int64_t input = 0; input < in; input++) {
            uint32_t code = pairs[(row * in + input) / 2] >> (input % 2 ? 0 : 4) & 15u;
            codes[(row / LANES * (in / 8) + input / 8) * LANES + row % LANES] |= code << 4 * (input % 8);
        }
}
