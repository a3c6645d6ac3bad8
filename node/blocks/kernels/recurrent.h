/* Causal convolutions of a few taps and the gated delta rule, token by token: compiled for each instruction set. */

/* Channels GROUP piece % groups .. of one row. */
static void NAME(convolve_piece)(const void *job, int64_t piece, int64_t thread) {
    const struct convolution *c = job;
    const int64_t groups = (c->channels + GROUP - 1) / GROUP, row = piece / groups, from = piece % groups * GROUP;
    const int64_t end = from + GROUP < c->channels ? from + GROUP : c->channels;
    (void)thread;
    for (int64_t first = from; first < end; first += LANES) {
        const int64_t lanes = end - first < LANES ? end - first : LANES;
        float taps[MOST_TAPS][LANES] = {{0}}, seen[MOST_TAPS][LANES] = {{0}}, bias[LANES] = {0}, sums[LANES];
        const float *x = c->x + (row * c->channels + first) * c->tokens;
        float *state = c->state ? c->state + (row * c->channels + first) * c->held : NULL;
        for (int64_t lane = 0; lane < lanes; lane++) {
            for (int64_t tap = 0; tap < c->taps; tap++) taps[tap][lane] = c->weight[(first + lane) * c->taps + tap];
            for (int64_t back = 1; state && back < c->taps; back++)
                seen[c->taps - back][lane] = state[(lane + 1) * c->held - back];
            if (c->bias) bias[lane] = c->bias[first + lane];
        }
        for (int64_t token = 0, place = 0; token < c->tokens; token++) { /* takes the place of the oldest in `seen` */
            for (int64_t lane = 0; lane < lanes; lane++) seen[place][lane] = x[lane * c->tokens + token];
            V sum = NAME(load)(bias);
            for (int64_t tap = 0; tap < c->taps; tap++) { /* from the oldest on; ends with this one */
                place = place + 1 < c->taps ? place + 1 : 0;
                sum = NAME(fma)(NAME(load)(seen[place]), NAME(load)(taps[tap]), sum);
            }
            place = place + 1 < c->taps ? place + 1 : 0;
            NAME(store)(sums, sum);
            if (c->silu) NAME(activate)(ACTIVATION_SILU, sums, NULL, LANES);
            float *into = c->y + (row * c->tokens + token) * c->channels + first;
            for (int64_t lane = 0; lane < lanes; lane++) into[lane] = sums[lane];
        }
        for (int64_t lane = 0; state && lane < lanes; lane++, state += c->held, x += c->tokens)
            for (int64_t place = 0; place < c->held; place++) {
                const int64_t from_x = place + c->tokens - c->held;
                state[place] = from_x < 0 ? state[place + c->tokens] : x[from_x];
            }
    }
}

static void NAME(convolve)(const struct convolution *c, int64_t threads) {
    do_pieces(threads, NAME(convolve_piece), c, c->rows * ((c->channels + GROUP - 1) / GROUP));
}

/* A query or key for the products, of length 1 times `scale` if `normed`; zeros up to whole vectors. */
INLINE void NAME(ready)(const float *x, int64_t dim, int64_t normed, float scale, float *into) {
    const int64_t whole = (dim + LANES - 1) / LANES * LANES;
    memset(into + whole - LANES, 0, LANES * sizeof(float));
    memcpy(into, x, dim * sizeof(float));
    if (normed) scale /= __builtin_sqrtf(NAME(dot)(into, into, whole) + 1e-6f);
    for (int64_t index = 0; index < whole; index += LANES)
        NAME(store)(into + index, NAME(mul)(NAME(load)(into + index), NAME(set)(scale)));
}

/* All tokens of COLUMNS values of one head of one row: no value depends on those beside it, and their part of the state
 * stays in the nearest cache. */
static void NAME(delta_piece)(const void *job, int64_t piece, int64_t thread) {
    enum { PARTS = COLUMNS / LANES };
    const struct delta_rule *d = job;
    const int64_t panels = (d->value_dim + COLUMNS - 1) / COLUMNS, column = piece % panels * COLUMNS, dim = d->key_dim;
    const int64_t head = piece / panels % d->heads, row = piece / panels / d->heads;
    const int64_t count = d->value_dim - column < COLUMNS ? d->value_dim - column : COLUMNS;
    float *state = d->state + (row * d->heads + head) * dim * d->value_dim + column;
    __attribute__((aligned(64))) float panel[MOST_KEY_DIM][COLUMNS], key[MOST_KEY_DIM], query[MOST_KEY_DIM];
    float decays[MOST_KEY_DIM] = {0}, given[COLUMNS] = {0}, out[COLUMNS];
    (void)thread;
    if (count < COLUMNS) memset(panel, 0, dim * sizeof *panel);
    for (int64_t k = 0; k < dim; k++) memcpy(panel[k], state + k * d->value_dim, count * sizeof(float));
    for (int64_t token = row * d->tokens; token < (row + 1) * d->tokens; token++) {
        const int64_t keyed = (token * d->key_heads + head * d->key_heads / d->heads) * dim, own = token * d->heads + head;
        NAME(ready)(d->key + keyed, dim, d->normed, 1.0f, key);
        NAME(ready)(d->query + keyed, dim, d->normed, 1.0f / __builtin_sqrtf((float)dim), query);
        memcpy(decays, d->decay + own * d->decays, d->decays * sizeof(float));
        exponentials(decays, d->decays);
        V sum[PARTS], delta[PARTS];
        UNROLL for (int part = 0; part < PARTS; part++) sum[part] = NAME(zero)();
        for (int64_t k = 0; k < dim; k++) { /* the value that the decayed state has for this key */
            const V decay = NAME(set)(decays[d->decays > 1 ? k : 0]), by = NAME(set)(key[k]);
            UNROLL for (int part = 0; part < PARTS; part++) {
                const V now = NAME(mul)(NAME(load)(panel[k] + part * LANES), decay);
                NAME(store)(panel[k] + part * LANES, now);
                sum[part] = NAME(fma)(now, by, sum[part]);
            }
        }
        memcpy(given, d->value + own * d->value_dim + column, count * sizeof(float));
        const V rate = NAME(set)(d->beta[own]), less = NAME(set)(-1.0f);
        UNROLL for (int part = 0; part < PARTS; part++) {
            delta[part] = NAME(mul)(NAME(fma)(sum[part], less, NAME(load)(given + part * LANES)), rate);
            sum[part] = NAME(zero)();
        }
        for (int64_t k = 0; k < dim; k++) {
            const V by = NAME(set)(key[k]), asked = NAME(set)(query[k]);
            UNROLL for (int part = 0; part < PARTS; part++) {
                const V now = NAME(fma)(by, delta[part], NAME(load)(panel[k] + part * LANES));
                NAME(store)(panel[k] + part * LANES, now);
                sum[part] = NAME(fma)(now, asked, sum[part]);
            }
        }
        UNROLL for (int part = 0; part < PARTS; part++) NAME(store)(out + part * LANES, sum[part]);
        memcpy(d->out + own * d->value_dim + column, out, count * sizeof(float));
    }
    for (int64_t k = 0; k < dim; k++) memcpy(state + k * d->value_dim, panel[k], count * sizeof(float));
}

static void NAME(delta)(const struct delta_rule *d, int64_t threads) {
    do_pieces(threads, NAME(delta_piece), d, d->rows * d->heads * ((d->value_dim + COLUMNS - 1) / COLUMNS));
}
