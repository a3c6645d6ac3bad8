/* Causal convolutions of a few taps and the gated delta rule, token by token, by themselves and within a step: compiled for each
 * instruction set. */

/* LANES channels from `first` on of all tokens of a row, whose inputs are `across` apart from one channel to the next and `along`
 * from one token to the next, behind those that it has seen `before` (NULL: zeros); `state`: those that it has seen then. */
INLINE void NAME(convolve_lanes)(const struct convolution *c, int64_t first, const float *x, int64_t across, int64_t along,
                                 const float *before, float *state, float *y) {
    const int64_t lanes = c->channels - first < LANES ? c->channels - first : LANES;
    float taps[MOST_TAPS][LANES] = {{0}}, seen[MOST_TAPS][LANES] = {{0}}, bias[LANES] = {0}, sums[LANES];
    for (int64_t lane = 0; lane < lanes; lane++) {
        for (int64_t tap = 0; tap < c->taps; tap++) taps[tap][lane] = c->weight[(first + lane) * c->taps + tap];
        for (int64_t back = 1; before && back < c->taps; back++)
            seen[c->taps - back][lane] = before[(first + lane + 1) * c->held - back];
        if (c->bias) bias[lane] = c->bias[first + lane];
    }
    for (int64_t token = 0, place = 0; token < c->tokens; token++) { /* takes the place of the oldest in `seen` */
        for (int64_t lane = 0; lane < lanes; lane++) seen[place][lane] = x[lane * across + token * along];
        V sum = NAME(load)(bias);
        for (int64_t tap = 0; tap < c->taps; tap++) { /* from the oldest on; ends with this one */
            place = place + 1 < c->taps ? place + 1 : 0;
            sum = NAME(fma)(NAME(load)(seen[place]), NAME(load)(taps[tap]), sum);
        }
        place = place + 1 < c->taps ? place + 1 : 0;
        NAME(store)(sums, sum);
        if (c->silu) NAME(activate)(ACTIVATION_SILU, sums, NULL, LANES);
        memcpy(y + token * c->channels + first, sums, lanes * sizeof(float));
    }
    for (int64_t lane = 0; state && lane < lanes; lane++)
        for (int64_t place = 0, at = (first + lane) * c->held; place < c->held; place++, at++) {
            const int64_t from_x = place + c->tokens - c->held;
            if (from_x >= 0) state[at] = x[lane * across + from_x * along];
            else state[at] = before ? before[at + c->tokens] : 0.0f;
        }
}

/* Channels GROUP piece % groups .. of one row. */
static void NAME(convolve_piece)(const void *job, int64_t piece, int64_t thread) {
    const struct convolution *c = job;
    const int64_t groups = (c->channels + GROUP - 1) / GROUP, row = piece / groups, from = piece % groups * GROUP;
    float *state = c->state ? c->state + row * c->channels * c->held : NULL;
    (void)thread;
    for (int64_t first = from; first < from + GROUP && first < c->channels; first += LANES)
        NAME(convolve_lanes)(c, first, c->x + (row * c->channels + first) * c->tokens, c->tokens, 1, state, state,
                             c->y + row * c->tokens * c->channels);
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
 * stays in the nearest cache. `before` (NULL: zeros) and `state`: of the row. */
static void NAME(delta_columns)(const struct delta_rule *d, int64_t piece, const float *before, float *state) {
    enum { PARTS = COLUMNS / LANES };
    const int64_t panels = (d->value_dim + COLUMNS - 1) / COLUMNS, column = piece % panels * COLUMNS, dim = d->key_dim;
    const int64_t head = piece / panels % d->heads, row = piece / panels / d->heads;
    const int64_t count = d->value_dim - column < COLUMNS ? d->value_dim - column : COLUMNS;
    const int64_t place = head * dim * d->value_dim + column;
    __attribute__((aligned(64))) float panel[MOST_KEY_DIM][COLUMNS], key[MOST_KEY_DIM], query[MOST_KEY_DIM];
    float decays[MOST_KEY_DIM] = {0}, given[COLUMNS] = {0}, out[COLUMNS];
    if (count < COLUMNS || !before) memset(panel, 0, dim * sizeof *panel);
    for (int64_t k = 0; before && k < dim; k++) memcpy(panel[k], before + place + k * d->value_dim, count * sizeof(float));
    for (int64_t token = row * d->tokens; token < (row + 1) * d->tokens; token++) {
        const int64_t keyed = token * d->key_pitch + head * d->key_heads / d->heads * dim, own = token * d->heads + head;
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
        memcpy(given, d->value + token * d->value_pitch + head * d->value_dim + column, count * sizeof(float));
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
    for (int64_t k = 0; k < dim; k++) memcpy(state + place + k * d->value_dim, panel[k], count * sizeof(float));
}

INLINE int64_t NAME(delta_pieces)(const struct delta_rule *d) { return d->heads * ((d->value_dim + COLUMNS - 1) / COLUMNS); }

static void NAME(delta_piece)(const void *job, int64_t piece, int64_t thread) {
    const struct delta_rule *d = job;
    float *state = d->state + piece / NAME(delta_pieces)(d) * d->heads * d->key_dim * d->value_dim;
    (void)thread;
    NAME(delta_columns)(d, piece, state, state);
}

static void NAME(delta)(const struct delta_rule *d, int64_t threads) {
    do_pieces(threads, NAME(delta_piece), d, d->rows * NAME(delta_pieces)(d));
}

/* --- a block's delta rule within a step --- */

/* What its phases share: outputs of the projections, [number][out] each. */
struct NAME(mixing) {
    const struct NAME(state) *w;
    const struct delta *d;
    float *projected[PROJECTIONS], *beta, *decay;
    struct convolution c;
    struct delta_rule rule;
};

/* Where the `index`th value of a part stands for a row. */
INLINE const float *NAME(at)(const struct NAME(mixing) *g, int part, int64_t row, int64_t index) {
    const struct values *p = g->d->parts + part;
    const int64_t place = p->first + index / p->width * p->pitch + index % p->width;
    return g->projected[p->projection] + row * g->d->projection[p->projection].out + place;
}

/* Of the `which`th state, those of the row that a sequence is: before the step, and behind it. */
INLINE const float *NAME(before)(const struct NAME(mixing) *g, int64_t sequence, int which, int64_t size) {
    const struct row *row = g->w->rows + sequence * g->c.tokens;
    const float *states = row->states[5 * g->w->mixed + 2 * which];
    return states ? states + row->row * size : NULL;
}

INLINE float *NAME(behind)(const struct NAME(mixing) *g, int64_t sequence, int which, int64_t size) {
    const struct row *row = g->w->rows + sequence * g->c.tokens;
    return row->states[5 * g->w->mixed + 2 * which + 1] + row->row * size;
}

/* Where what enters the states with a token is kept, a row of the batch; NULL: nowhere. */
INLINE float *NAME(kept)(const struct NAME(mixing) *g, int64_t r) {
    const struct row *row = g->w->rows + r;
    const int64_t tokens = g->c.tokens, size = 2 * g->c.channels - g->d->key_heads * g->d->key_dim + g->d->heads * (1 + g->d->decays);
    float *kept = row->states[5 * g->w->mixed + 4];
    return kept ? kept + (row->row * tokens + r % tokens) * size : NULL;
}

static void NAME(mix_convolve_piece)(const void *job, int64_t piece, int64_t thread) {
    const struct NAME(mixing) *g = job;
    const struct convolution *c = &g->c;
    const int64_t groups = (c->channels + GROUP - 1) / GROUP, sequence = piece / groups, from = piece % groups * GROUP;
    const int64_t keys = g->d->key_heads * g->d->key_dim, held = c->channels * c->held;
    const float *before = NAME(before)(g, sequence, 0, held);
    float *state = NAME(behind)(g, sequence, 0, held);
    (void)thread;
    for (int64_t first = from; first < from + GROUP && first < c->channels; first += LANES) {
        const int part = first < keys ? PART_QUERY : first < 2 * keys ? PART_KEY : PART_VALUE;
        const int64_t row = sequence * c->tokens, along = g->d->projection[g->d->parts[part].projection].out;
        const float *x = NAME(at)(g, part, row, first - part * keys);
        NAME(convolve_lanes)(c, first, x, 1, along, before, state, c->y + row * c->channels);
        for (int64_t token = 0; token < c->tokens; token++) {
            float *kept = NAME(kept)(g, row + token);
            if (kept) memcpy(kept + first, x + token * along, LANES * sizeof(float));
            if (kept && part != PART_QUERY)
                memcpy(kept + c->channels + first - keys, c->y + (row + token) * c->channels + first, LANES * sizeof(float));
        }
    }
}

/* Betas and the logarithms of decays of a row. */
static void NAME(gates_piece)(const void *job, int64_t row, int64_t thread) {
    const struct NAME(mixing) *g = job;
    const struct delta *d = g->d;
    (void)thread;
    for (int64_t head = 0; head < d->heads; head++) {
        const float rate = -exponential(d->rates[head]);
        g->beta[row * d->heads + head] = d->most / (1.0f + exponential(-*NAME(at)(g, PART_BETA, row, head)));
        for (int64_t index = head * d->decays; index < (head + 1) * d->decays; index++) {
            const float x = *NAME(at)(g, PART_DECAY, row, index) + d->moved[index];
            g->decay[row * d->heads * d->decays + index] = rate * (x > 20.0f ? x : logarithm_of_more(exponential(x)));
        }
    }
    float *kept = NAME(kept)(g, row);
    if (!kept) return;
    kept += 2 * g->c.channels - d->key_heads * d->key_dim;
    memcpy(kept, g->beta + row * d->heads, d->heads * sizeof(float));
    memcpy(kept + d->heads, g->decay + row * d->heads * d->decays, d->heads * d->decays * sizeof(float));
}

static void NAME(mix_delta_piece)(const void *job, int64_t piece, int64_t thread) {
    const struct NAME(mixing) *g = job;
    const int64_t sequence = piece / NAME(delta_pieces)(&g->rule), size = g->d->heads * g->d->key_dim * g->d->value_dim;
    (void)thread;
    NAME(delta_columns)(&g->rule, piece, NAME(before)(g, sequence, 1, size), NAME(behind)(g, sequence, 1, size));
}

/* One head of one row: its outputs, normed, times what the gate lets through. */
static void NAME(mix_gate_piece)(const void *job, int64_t piece, int64_t thread) {
    const struct NAME(mixing) *g = job;
    const struct delta *d = g->d;
    float *out = g->rule.out + piece * d->value_dim, *mixed = g->w->attended + piece * d->value_dim;
    (void)thread;
    NAME(rms_norm)(out, d->norm, d->value_dim, d->eps, out);
    memcpy(mixed, NAME(at)(g, PART_GATE, piece / d->heads, piece % d->heads * d->value_dim), d->value_dim * sizeof(float));
    NAME(activate)(d->gate, mixed, out, d->value_dim);
}

/* What the delta rule makes of `normed`, into `attended`. A token of padding changes no state: all of it is zero. */
static void NAME(mix)(const struct NAME(state) *w) {
    const struct delta *d = w->b->delta;
    const int64_t number = w->number, tokens = most(w->several, 1), keys = d->key_heads * d->key_dim, values = d->heads * d->value_dim;
    struct NAME(mixing) g = {.w = w, .d = d, .projected = {w->mixing}};
    for (int64_t r = 0; r < number; r++)
        if (w->rows[r].length < w->rows[r].padding) memset(w->normed + r * w->s->hidden, 0, w->s->hidden * sizeof(float));
    for (int64_t first = 0, count; first < d->projections; first += count) { /* those of one input together, as far as they can */
        const int32_t of = d->of[first];
        struct NAME(linears) in = {.x = of < 0 ? w->normed : g.projected[of], .rows = number};
        for (count = 0; count < 3 && first + count < d->projections; count++) {
            const struct matrix *m = d->projection + first + count;
            if (count && (d->of[first + count] != of || m->rounds != in.m[0]->rounds)) break;
            if (first + count) g.projected[first + count] = g.projected[first + count - 1] + number * m[-1].out;
            in.m[count] = m, in.y[count] = g.projected[first + count];
        }
        in.count = count, in.next = first + count < d->projections ? d->projection + first + count : &w->b->output;
        NAME(linear)(w, in);
    }
    const int64_t last = d->projections - 1;
    float *convolved = g.projected[last] + number * d->projection[last].out, *out = convolved + number * (2 * keys + values);
    g.beta = out + number * values, g.decay = g.beta + number * d->heads;
    g.c = (struct convolution){.weight = d->taps_of, .bias = d->bias, .y = convolved, .channels = 2 * keys + values, .tokens = tokens,
                               .taps = d->taps, .held = d->held, .silu = 1};
    g.rule = (struct delta_rule){convolved, convolved + keys, convolved + 2 * keys, g.decay, g.beta, NULL, out, number / tokens, tokens,
                                 d->heads, d->key_heads, d->key_dim, d->value_dim, d->decays, 1, g.c.channels, g.c.channels};
    do_pieces(w->threads, NAME(mix_convolve_piece), &g, number / tokens * ((g.c.channels + GROUP - 1) / GROUP));
    do_pieces(w->threads, NAME(gates_piece), &g, number);
    do_pieces(w->threads, NAME(mix_delta_piece), &g, number / tokens * NAME(delta_pieces)(&g.rule));
    do_pieces(w->threads, NAME(mix_gate_piece), &g, number * d->heads);
}
