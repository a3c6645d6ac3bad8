/* Attention of a step's rows: compiled for each instruction set. */

/* Rotates the two halves of the first `dim` values of a head (Su et al. 2021, as in Llama's checkpoints). */
INLINE void NAME(rotate)(float *x, const float *cosines, const float *sines, int64_t dim) {
    for (int64_t index = 0; index < dim / 2; index++) {
        float low = x[index], high = x[index + dim / 2];
        x[index] = low * cosines[index] - high * sines[index];
        x[index + dim / 2] = high * cosines[index + dim / 2] + low * sines[index + dim / 2];
    }
}

/* The largest of some values, NaN aside. */
INLINE float NAME(largest_score)(const float *scores, int64_t count) {
    float most = scores[0], lanes[LANES];
    int64_t index = 0;
    EACH lanes[lane] = most;
    for (; index + LANES <= count; index += LANES)
        EACH lanes[lane] = scores[index + lane] > lanes[lane] ? scores[index + lane] : lanes[lane];
    EACH most = lanes[lane] > most ? lanes[lane] : most;
    for (; index < count; index++) most = scores[index] > most ? scores[index] : most;
    return most;
}

/* Sums of `heads` rows of values, each one after the other: side by side, since a sum waits for the one before it. */
INLINE void NAME(score_sums)(const float *scores, int heads, int64_t count, float *sums) {
    float sum[4] = {0};
    for (int64_t index = 0; index < count; index++)
        UNROLL for (int head = 0; head < heads; head++) sum[head] += scores[head * count + index];
    UNROLL for (int head = 0; head < heads; head++) sums[head] = sum[head];
}

/* Scores [heads][count] as shares of one. `sinks`: of each head one score more, of which nothing comes; or NULL. */
static void NAME(softmax)(float *scores, int64_t heads, int64_t count, const float *sinks) {
    for (int64_t taken; heads; heads -= taken, scores += taken * count, sinks += sinks ? taken : 0) {
        float most[4], sums[4];
        taken = heads < 4 ? heads : 4;
        for (int64_t head = 0; head < taken; head++) {
            float *own = scores + head * count;
            most[head] = NAME(largest_score)(own, count);
            if (sinks && sinks[head] > most[head]) most[head] = sinks[head];
            for (int64_t index = 0; index < count; index++) own[index] -= most[head];
            exponentials(own, count);
        }
        if (taken == 4) NAME(score_sums)(scores, 4, count, sums);
        else if (taken == 3) NAME(score_sums)(scores, 3, count, sums);
        else if (taken == 2) NAME(score_sums)(scores, 2, count, sums);
        else NAME(score_sums)(scores, 1, count, sums);
        for (int64_t head = 0; head < taken; head++) {
            if (sinks) sums[head] += exponential(sinks[head] - most[head]);
            for (int64_t index = 0; index < count; index++) scores[head * count + index] /= sums[head];
        }
    }
}

/* What `tokens` keys or values stand for, into `panel` [tokens][dim]. */
INLINE void NAME(open_keys)(int32_t held, const uint8_t *from, int64_t tokens, int64_t dim, float *panel) {
    const int64_t bytes = key_bytes(held, dim);
    for (int64_t token = 0; token < tokens; token++, from += bytes, panel += dim) {
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + PANEL * bytes + line);
        if (held == HELD_BF16) {
            for (int64_t index = 0; index < dim; index += LANES)
                NAME(store)(panel + index, NAME(brain)((const uint16_t *)(from + 2 * index)));
            continue;
        }
        const uint8_t *scales = from + dim;
        for (int64_t first = 0; first < dim; first += ROUND, scales += 2) {
            V unit = NAME(set)(bits_float((uint32_t)scales[0] << 16 | (uint32_t)scales[1] << 24));
            const int64_t end = first + ROUND < dim ? first + ROUND : dim;
            for (int64_t index = first; index < end; index += LANES)
                NAME(store)(panel + index, NAME(mul)(NAME(bytes)((const int8_t *)from + index), unit));
        }
    }
}

/* Scores of query heads with keys [tokens][dim], into scores [heads][all]. */
INLINE void NAME(score_keys)(const float *query, int64_t heads, const float *keys, const float *values, int64_t tokens,
                             int64_t dim, float scale, float *scores, int64_t all) {
    for (int64_t token = 0; token < tokens; token += 4) {
        const int64_t count = tokens - token < 4 ? tokens - token : 4;
        for (int64_t index = 0; values && index < count * dim; index += LANES) { /* caches of many sessions are larger than the processor's */
            __builtin_prefetch(keys + (token + AHEAD) * dim + index);
            __builtin_prefetch(values + token * dim + index);
        }
        for (int64_t head = 0; head < heads; head++) {
            const float *own = query + head * dim, *at = keys + token * dim;
            float *into = scores + head * all + token;
            if (count < 4) {
                for (int64_t k = 0; k < count; k++) into[k] = NAME(dot)(own, at + k * dim, dim) * scale;
                continue;
            }
            V sum[4]; /* four dot products side by side */
            UNROLL for (int k = 0; k < 4; k++) sum[k] = NAME(zero)();
            for (int64_t index = 0; index < dim; index += LANES) {
                const V part = NAME(load)(own + index);
                UNROLL for (int k = 0; k < 4; k++) sum[k] = NAME(fma)(part, NAME(load)(at + k * dim + index), sum[k]);
            }
            NAME(totals)(sum, scale, into);
        }
    }
}

/* Adds values [tokens][dim] with the shares [heads][all] to out [heads][dim]; `begins`: to nothing. A token after the
 * other, so that it is all the same where a panel ends. */
INLINE void NAME(add_values)(const float *shares, int64_t all, int64_t heads, const float *values, int64_t tokens,
                             int64_t dim, int begins, float *out) {
    for (int64_t head = 0; head < heads; head++)
        for (int64_t first = 0; first < dim; first += 4 * LANES) {
            int parts = dim - first >= 4 * LANES ? 4 : (int)((dim - first) / LANES);
            float *to = out + head * dim + first;
            V sum[4];
            UNROLL for (int part = 0; part < 4; part++)
                sum[part] = begins || part >= parts ? NAME(zero)() : NAME(load)(to + part * LANES);
            const float *share = shares + head * all;
            if (parts == 4)
                for (int64_t token = 0; token < tokens; token++) {
                    V weight = NAME(set)(share[token]);
                    UNROLL for (int part = 0; part < 4; part++)
                        sum[part] = NAME(fma)(weight, NAME(load)(values + token * dim + first + part * LANES), sum[part]);
                }
            else
                for (int64_t token = 0; token < tokens; token++)
                    for (int part = 0; part < parts; part++)
                        sum[part] = NAME(fma)(NAME(set)(share[token]),
                                              NAME(load)(values + token * dim + first + part * LANES), sum[part]);
            for (int part = 0; part < parts; part++) NAME(store)(to + part * LANES, sum[part]);
        }
}

static void NAME(soften)(float *scores, int64_t heads, int64_t tokens, float softcap, const float *sinks) {
    const int64_t all = softcap > 0.0f ? heads * tokens : 0;
    for (int64_t index = 0; index < all; index++) scores[index] = 2.0f * (scores[index] / softcap);
    exponentials(scores, all);
    for (int64_t index = 0; index < all; index++) scores[index] = softcap * tangent_of(scores[index]);
    NAME(softmax)(scores, heads, tokens, sinks);
}

/* A piece of attention: one head of keys and values of one row, and the query heads that share it. */
struct NAME(heads) {
    const struct row *row;
    int64_t group, bytes, half; /* of the cache: of a key, and of all keys or values */
    float *query, *key, *value, *attended;
    uint8_t *keys; /* the row's own, from its first token on */
};

INLINE struct NAME(heads) NAME(heads_of)(const struct NAME(state) *w, int64_t piece) {
    const struct shape *s = w->s;
    const int64_t dim = s->head_dim, group = s->heads / s->kv_heads, r = piece / s->kv_heads, head = piece % s->kv_heads;
    const struct row *row = w->rows + r;
    const int64_t bytes = key_bytes(s->held, dim), half = row->batch * s->kv_heads * row->max_length * bytes;
    const int64_t queries = (r * s->heads + head * group) * dim, own = (r * s->kv_heads + head) * dim;
    return (struct NAME(heads)){row, group, bytes, half, w->query + queries, w->key + own, w->value + own, w->attended + queries,
                                row->memory + 2 * w->index * half + (row->row * s->kv_heads + head) * row->max_length * bytes};
}

/* Turns the queries and the key by the row's position, and holds key and value. */
static void NAME(hold_piece)(const void *job, int64_t piece, int64_t thread) {
    const struct NAME(state) *w = job;
    const struct shape *s = w->s;
    const struct block *b = w->b;
    const struct NAME(heads) h = NAME(heads_of)(w, piece);
    const int64_t dim = s->head_dim, turned = s->rotary_dim, place = (b->rotary * w->number + piece / s->kv_heads) * turned;
    const float *cosine = w->cosines + place, *sine = w->sines + place;
    (void)thread;
    for (int64_t q = 0; q < h.group; q++) {
        if (b->query_norm && !b->whole) NAME(rms_norm)(h.query + q * dim, b->query_norm, dim, s->eps, h.query + q * dim);
        NAME(rotate)(h.query + q * dim, cosine, sine, turned);
    }
    if (b->key_norm && !b->whole) NAME(rms_norm)(h.key, b->key_norm, dim, s->eps, h.key);
    NAME(rotate)(h.key, cosine, sine, turned);
    hold_key(s->held, h.key, dim, h.keys + h.row->length * h.bytes);
    hold_key(s->held, h.value, dim, h.keys + h.half + h.row->length * h.bytes);
}

/* What some rows of a session look at: their query heads that share a head of keys and values, which are taken some tokens at
 * a time for all of them. `scores`: those of all rows, and a panel behind. */
static void NAME(attend)(const struct NAME(state) *w, int64_t row, int64_t rows, int64_t head, float *scores) {
    const struct shape *s = w->s;
    const struct block *b = w->b;
    const int64_t dim = s->head_dim, as_held = s->held == HELD_F32, panel = as_held ? most(PANEL_VALUES / dim, 4) : PANEL;
    struct NAME(heads) h[ATTENDED];
    int64_t from[ATTENDED], tokens[ATTENDED], begin = 0, end = 0;
    float *own[ATTENDED], *opened = scores + w->score_count - PANEL * dim;
    for (int64_t r = 0; r < rows; r++) {
        h[r] = NAME(heads_of)(w, (row + r) * s->kv_heads + head);
        const int64_t length = h[r].row->length;
        from[r] = h[r].row->padding < length ? h[r].row->padding : length;
        if (b->window && length + 1 - b->window > from[r]) from[r] = length + 1 - b->window;
        tokens[r] = length + 1 - from[r];
        begin = r && begin < from[r] ? begin : from[r];
        end = most(end, length + 1);
        own[r] = scores;
        scores += h[r].group * tokens[r];
    }
    for (int value = 0; value < 2; value++) {
        const uint8_t *held = h[0].keys + value * h[0].half;
        for (int64_t first = begin; first < end; first += panel) {
            const int64_t stop = first + panel < end ? first + panel : end;
            const float *at = (const float *)(held + first * h[0].bytes), *ahead = (const float *)(held + h[0].half + first * h[0].bytes);
            if (!as_held) NAME(open_keys)(s->held, held + first * h[0].bytes, stop - first, dim, opened), at = opened;
            for (int64_t r = 0; r < rows; r++) {
                const int64_t place = most(first, from[r]), last = from[r] + tokens[r], count = (last < stop ? last : stop) - place;
                float *into = own[r] + place - from[r];
                if (count <= 0) continue;
                if (value) NAME(add_values)(into, tokens[r], h[r].group, at + (place - first) * dim, count, dim, place == from[r], h[r].attended);
                else NAME(score_keys)(h[r].query, h[r].group, at + (place - first) * dim, as_held && !r ? ahead + (place - first) * dim : NULL,
                                      count, dim, b->scale, into, tokens[r]);
            }
        }
        for (int64_t r = 0; !value && r < rows; r++)
            NAME(soften)(own[r], h[r].group, tokens[r], s->softcap, b->sinks ? b->sinks + head * h[r].group : NULL);
    }
}

static void NAME(attend_piece)(const void *job, int64_t piece, int64_t thread) {
    const struct NAME(state) *w = job;
    const int64_t first = piece / w->s->kv_heads * w->together, head = piece % w->s->kv_heads;
    const int64_t end = first + w->together < w->number ? first + w->together : w->number;
    for (int64_t row = first, rows; row < end; row += rows) {
        const struct row *own = w->rows + row;
        for (rows = 1; row + rows < end && own[rows].memory == own->memory && own[rows].row == own->row;) rows++;
        NAME(attend)(w, row, rows, head, w->scores + thread * w->score_count);
    }
}

static void NAME(attention_piece)(const void *job, int64_t piece, int64_t thread) {
    NAME(hold_piece)(job, piece, thread);
    NAME(attend_piece)(job, piece, thread);
}
