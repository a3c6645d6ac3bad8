/* Attention over latents: compiled for each instruction set (multi-head latent attention: DeepSeek-AI, arXiv 2405.04434, 2.1).
 *
 * Of a token one latent and one turned key are held for all heads. A head's other keys, and its values, would be products of the
 * latent with two matrices of the head's own. They are never made: queries are multiplied with the first one and compared with
 * latents, and the second one makes a value of the latents that are added up. */

/* Turns pairs of values that stand beside each other, a row's `dim`. */
INLINE void NAME(turn_beside)(float *x, const float *cosines, const float *sines, int64_t dim, int parted) {
    float made[MOST_KEY_DIM];
    for (int64_t index = 0; index < dim / 2; index++) {
        const float low = x[2 * index], high = x[2 * index + 1];
        made[parted ? index : 2 * index] = low * cosines[index] - high * sines[index];
        made[parted ? index + dim / 2 : 2 * index + 1] = high * cosines[index] + low * sines[index];
    }
    memcpy(x, made, dim * sizeof(float));
}

/* Turns `rotary_dim` values by the position of row `r`. */
INLINE void NAME(turn)(const struct NAME(state) *w, int64_t r, float *x) {
    const int64_t dim = w->s->rotary_dim, place = (w->b->rotary * w->number + r) * dim;
    if (w->s->pairs == PAIRS_APART) NAME(rotate)(x, w->cosines + place, w->sines + place, dim);
    else NAME(turn_beside)(x, w->cosines + place, w->sines + place, dim, w->s->pairs == PAIRS_PARTED);
}

/* y [rows][in] = x [rows][out] times the matrix. Packed weights are opened, some inputs at a time. */
static void NAME(multiply_turned)(const struct matrix *m, const float *x, int64_t rows, float *y) {
    const int64_t in = m->in, out = m->out, longest = PANEL_VALUES / out / LANES * LANES;
    if (m->form == FORM_F32 || m->form == FORM_BF16 || m->form == FORM_F16) {
        struct matrix from = *m; /* its transpose, whose columns stand one behind the other */
        from.in = m->out, from.out = from.block = m->in, from.bias = NULL;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t first = 0; first < in; first += LANES)
                if (m->form == FORM_F32) NAME(columns)(&from, FORM_F32, 1, first, x + r * out, y + r * in);
                else if (m->form == FORM_BF16) NAME(columns)(&from, FORM_BF16, 1, first, x + r * out, y + r * in);
                else NAME(columns)(&from, FORM_F16, 1, first, x + r * out, y + r * in);
        return;
    }
    __attribute__((aligned(64))) float panel[PANEL_VALUES];
    for (int64_t from = 0, to; from < in; from = to) {
        const int64_t end = from - from % m->block + m->block;
        to = from + longest < end ? from + longest : end;
        for (int64_t tile = 0; tile < out / LANES; tile++) NAME(open_weights)(m, tile, from, to, out, panel + tile * LANES);
        NAME(score_keys)(x, rows, panel, NULL, to - from, out, 1.0f, y + from, in);
    }
}

/* What of a row's cache is looked at: latents, and behind those of all rows turned keys. */
struct NAME(held) { uint8_t *latents, *keys; int64_t bytes, key_bytes; };

INLINE struct NAME(held) NAME(held_of)(const struct NAME(state) *w, int64_t r) {
    const struct row *row = w->rows + r;
    const int64_t bytes = key_bytes(w->s->held, w->s->latent), turned = key_bytes(w->s->held, w->s->rotary_dim);
    uint8_t *block = row->memory + w->index * row->batch * row->max_length * (bytes + turned);
    return (struct NAME(held)){block + row->row * row->max_length * bytes,
                               block + (row->batch * bytes + row->row * turned) * row->max_length, bytes, turned};
}

static void NAME(hold_latent)(const struct NAME(state) *w, int64_t r) {
    const struct shape *s = w->s;
    const struct NAME(held) h = NAME(held_of)(w, r);
    const int64_t length = w->rows[r].length;
    float *latent = w->key + r * (s->latent + s->rotary_dim);
    NAME(rms_norm)(latent, w->b->key_norm, s->latent, s->latent_eps, latent);
    NAME(turn)(w, r, latent + s->latent);
    hold_key(s->held, latent, s->latent, h.latents + length * h.bytes);
    hold_key(s->held, latent + s->latent, s->rotary_dim, h.keys + length * h.key_bytes);
}

/* A head's queries of all rows, turned where that is so, and as they are compared with latents, into `latents`
 * [heads][number][latent]. Behind the last head's piece: what is held of the rows. */
static void NAME(query_piece)(const void *job, int64_t head, int64_t thread) {
    const struct NAME(state) *w = job;
    const struct shape *s = w->s;
    const int64_t dim = s->head_dim, plain = dim - s->rotary_dim, number = w->number;
    const struct matrix *m = w->b->latent + 2 * head;
    float *given = w->scores + thread * w->score_count, *into = w->latents + head * number * s->latent;
    if (head == s->heads) {
        for (int64_t r = 0; r < number; r++) NAME(hold_latent)(w, r);
        return;
    }
    for (int64_t r = 0; r < number; r++) {
        float *query = w->query + (r * s->heads + head) * dim;
        memcpy(given + r * plain, query, plain * sizeof(float));
        NAME(turn)(w, r, query + plain);
    }
    if (w->b->turned) NAME(multiply_turned)(m, given, number, into);
    else NAME(multiply)(m, given, number, into, given + number * plain, 1);
}

/* Scores of one query with tokens: of its two parts with latents and turned keys, a sum in lanes. */
INLINE void NAME(score_latents)(const float *query, const float *turned, const float *latents, const float *keys, int64_t tokens,
                                int64_t rank, int64_t dim, float scale, float *scores) {
    for (int64_t token = 0; token < tokens; token += 4, latents += 4 * rank, keys += 4 * dim) {
        const int64_t count = tokens - token < 4 ? tokens - token : 4;
        float found[4];
        V sum[4];
        UNROLL for (int k = 0; k < 4; k++) sum[k] = NAME(zero)();
        if (count == 4) {
            for (int64_t index = 0; index < rank; index += LANES) {
                const V part = NAME(load)(query + index);
                UNROLL for (int k = 0; k < 4; k++) sum[k] = NAME(fma)(part, NAME(load)(latents + k * rank + index), sum[k]);
            }
            for (int64_t index = 0; index < dim; index += LANES) {
                const V part = NAME(load)(turned + index);
                UNROLL for (int k = 0; k < 4; k++) sum[k] = NAME(fma)(part, NAME(load)(keys + k * dim + index), sum[k]);
            }
        } else
            for (int64_t k = 0; k < count; k++) {
                V own = NAME(zero)();
                for (int64_t index = 0; index < rank; index += LANES)
                    own = NAME(fma)(NAME(load)(query + index), NAME(load)(latents + k * rank + index), own);
                for (int64_t index = 0; index < dim; index += LANES)
                    own = NAME(fma)(NAME(load)(turned + index), NAME(load)(keys + k * dim + index), own);
                sum[k] = own;
            }
        NAME(totals)(sum, scale, found);
        memcpy(scores + token, found, count * sizeof(float));
    }
}

/* How many rows and heads look together: rows of one session; heads so that all threads have something to do. */
struct NAME(looking) { int64_t rows, heads; };

INLINE struct NAME(looking) NAME(looking_of)(const struct NAME(state) *w) {
    const int64_t all = w->s->heads, each = w->several ? 4 : (all * w->number + 2 * w->threads - 1) / (2 * w->threads);
    const int64_t heads = each < ATTENDED ? each : ATTENDED;
    return (struct NAME(looking)){w->several ? 4 : 1, heads < all ? heads : all};
}

/* What `heads` heads of some rows of a session look at, in the place of their queries in `latents`. Latents are taken some
 * tokens at a time for all of them. `scores`: those of all, and a panel behind. */
static void NAME(look)(const struct NAME(state) *w, int64_t row, int64_t rows, int64_t head, int64_t heads, float *scores) {
    const struct shape *s = w->s;
    const struct block *b = w->b;
    const int64_t rank = s->latent, dim = s->rotary_dim, number = w->number, as_held = s->held == HELD_F32;
    const int64_t panel = as_held ? most(PANEL_VALUES / (rank + dim) / 4 * 4, 4) : PANEL;
    const struct NAME(held) h = NAME(held_of)(w, row);
    int64_t from[ATTENDED], tokens[ATTENDED], begin = 0, end = 0;
    float *own[ATTENDED], *opened = scores + w->score_count - PANEL * (rank + dim), *opened_keys = opened + PANEL * rank;
    float *queries = w->latents + (head * number + row) * rank; /* from one head to the next: number * rank */
    const float *turned = w->query + (row * s->heads + head) * s->head_dim + s->head_dim - dim;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t length = w->rows[row + r].length, padding = w->rows[row + r].padding;
        from[r] = padding < length ? padding : length;
        if (b->window && length + 1 - b->window > from[r]) from[r] = length + 1 - b->window;
        tokens[r] = length + 1 - from[r];
        begin = r && begin < from[r] ? begin : from[r];
        end = most(end, length + 1);
        own[r] = scores;
        scores += heads * tokens[r];
    }
    for (int summing = 0; summing < 2; summing++) {
        for (int64_t first = begin; first < end; first += panel) {
            const int64_t stop = first + panel < end ? first + panel : end;
            const float *latents = (const float *)(h.latents + first * h.bytes), *keys = (const float *)(h.keys + first * h.key_bytes);
            if (!as_held) NAME(open_keys)(s->held, h.latents + first * h.bytes, stop - first, rank, opened), latents = opened;
            if (!as_held && !summing) NAME(open_keys)(s->held, h.keys + first * h.key_bytes, stop - first, dim, opened_keys), keys = opened_keys;
            for (int64_t r = 0; r < rows; r++) {
                const int64_t place = most(first, from[r]), last = from[r] + tokens[r], count = (last < stop ? last : stop) - place;
                for (int64_t q = 0; count > 0 && q < heads; q++) {
                    float *into = own[r] + q * tokens[r] + place - from[r], *query = queries + (q * number + r) * rank;
                    const float *at = latents + (place - first) * rank;
                    if (summing) NAME(add_values)(into, tokens[r], 1, at, count, rank, place == from[r], query);
                    else NAME(score_latents)(query, turned + (r * s->heads + q) * s->head_dim, at, keys + (place - first) * dim, count,
                                             rank, dim, b->scale, into);
                }
            }
        }
        for (int64_t r = 0; !summing && r < rows; r++) NAME(soften)(own[r], heads, tokens[r], s->softcap, NULL);
    }
}

static void NAME(look_piece)(const void *job, int64_t piece, int64_t thread) {
    const struct NAME(state) *w = job;
    const struct NAME(looking) together = NAME(looking_of)(w);
    const int64_t parts = (w->s->heads + together.heads - 1) / together.heads;
    const int64_t first = piece / parts * together.rows, head = piece % parts * together.heads;
    const int64_t end = first + together.rows < w->number ? first + together.rows : w->number;
    const int64_t heads = head + together.heads < w->s->heads ? together.heads : w->s->heads - head;
    for (int64_t row = first, rows; row < end; row += rows) {
        const struct row *own = w->rows + row;
        for (rows = 1; row + rows < end && own[rows].memory == own->memory && own[rows].row == own->row;) rows++;
        NAME(look)(w, row, rows, head, heads, w->scores + thread * w->score_count);
    }
}

/* A head's values of all rows. */
static void NAME(value_piece)(const void *job, int64_t head, int64_t thread) {
    const struct NAME(state) *w = job;
    const int64_t dim = w->s->value_dim, number = w->number;
    float *made = w->scores + thread * w->score_count;
    NAME(multiply)(w->b->latent + 2 * head + 1, w->latents + head * number * w->s->latent, number, made, made + number * dim, 1);
    for (int64_t r = 0; r < number; r++) memcpy(w->attended + (r * w->s->heads + head) * dim, made + r * dim, dim * sizeof(float));
}

/* What the rows look at, into `attended`. */
static void NAME(latent_attention)(const struct NAME(state) *w, const struct change *changes, int64_t changed) {
    const struct shape *s = w->s;
    const struct block *b = w->b;
    const int64_t number = w->number, low = b->low.codes ? b->low.out : 0;
    const struct NAME(looking) together = NAME(looking_of)(w);
    NAME(linear)(w, (struct NAME(linears)){.m = {low ? &b->low : &b->query, &b->key}, .x = w->normed, .rows = number, .count = 2,
                                           .y = {low ? w->low : w->query, w->key}, .next = low ? &b->query : &b->output});
    for (int64_t place = 0; place < number * low; place += low)
        NAME(rms_norm)(w->low + place, b->query_norm, low, s->latent_eps, w->low + place);
    if (low)
        NAME(linear)(w, (struct NAME(linears)){.m = {&b->query}, .x = w->low, .rows = number, .count = 1, .y = {w->query}, .next = &b->output});
    NAME(adapt)(w, changes, changed, LAYER_QUERY, low ? w->low : w->normed, w->query);
    NAME(adapt)(w, changes, changed, LAYER_KEY, w->normed, w->key);
    do_pieces(w->threads, NAME(query_piece), w, s->heads + 1);
    do_pieces(w->threads, NAME(look_piece), w,
              (number + together.rows - 1) / together.rows * ((s->heads + together.heads - 1) / together.heads));
    do_pieces(w->threads, NAME(value_piece), w, s->heads);
}
