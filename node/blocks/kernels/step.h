/* A decode step of all blocks: compiled for each instruction set. */

/* --- norms and activations --- */

INLINE void NAME(rms_norm)(const float *x, const float *weight, int64_t count, float eps, float *y) {
    float mean = NAME(dot)(x, x, count) / (float)count + eps;
    V factor = NAME(set)(1.0f / __builtin_sqrtf(mean));
    for (int64_t index = 0; index < count; index += LANES)
        NAME(store)(y + index, NAME(mul)(NAME(load)(weight + index), NAME(mul)(NAME(load)(x + index), factor)));
}

INLINE void NAME(layer_norm)(const float *x, const float *weight, const float *bias, int64_t count, float eps, float *y) {
    V sum = NAME(zero)(), squares = NAME(zero)();
    for (int64_t index = 0; index < count; index += LANES) sum = NAME(add)(sum, NAME(load)(x + index));
    V less = NAME(set)(-NAME(total)(sum) / (float)count);
    for (int64_t index = 0; index < count; index += LANES) {
        V off = NAME(add)(NAME(load)(x + index), less);
        squares = NAME(fma)(off, off, squares);
    }
    V factor = NAME(set)(1.0f / __builtin_sqrtf(NAME(total)(squares) / (float)count + eps));
    for (int64_t index = 0; index < count; index += LANES) {
        V off = NAME(mul)(NAME(add)(NAME(load)(x + index), less), factor);
        NAME(store)(y + index, NAME(fma)(off, NAME(load)(weight + index), NAME(load)(bias + index)));
    }
}

/* Rows of the hidden size, normalised; `bias` makes it a layer norm, and without `weight` they stay as they are. */
static void NAME(norm_rows)(const struct shape *s, const float *x, const float *weight, const float *bias, int64_t rows,
                            float *y) {
    if (!weight) memcpy(y, x, rows * s->hidden * sizeof(float));
    for (int64_t place = 0; weight && place < rows * s->hidden; place += s->hidden)
        if (bias) NAME(layer_norm)(x + place, weight, bias, s->hidden, s->eps, y + place);
        else NAME(rms_norm)(x + place, weight, s->hidden, s->eps, y + place);
}

INLINE void NAME(add_to)(float *x, const float *y, int64_t count) {
    for (int64_t index = 0; index < count; index += LANES)
        NAME(store)(x + index, NAME(add)(NAME(load)(x + index), NAME(load)(y + index)));
}

/* gate = activation(gate) * up; without `up`, the activation alone. Of whole vectors. */
static void NAME(activate)(int32_t activation, float *gate, const float *up, int64_t count) {
    for (int64_t index = 0; index < count; index += LANES) {
        float *own = gate + index, powers[LANES];
        if (activation != ACTIVATION_GELU_TANH) {
            EACH powers[lane] = -own[lane];
            exponentials(powers, LANES);
            EACH own[lane] = (activation == ACTIVATION_SILU ? own[lane] : 1.0f) / (1.0f + powers[lane]);
        } else {
            EACH powers[lane] = 2.0f * (0.7978845608f * (own[lane] + 0.044715f * own[lane] * own[lane] * own[lane]));
            exponentials(powers, LANES);
            EACH own[lane] = 0.5f * own[lane] * (1.0f + tangent_of(powers[lane]));
        }
        if (up) NAME(store)(own, NAME(mul)(NAME(load)(own), NAME(load)(up + index)));
    }
}

/* What the phases of a step share. `scores`: of each thread; `together`: rows in a piece of attention. */
struct NAME(state) {
    const struct shape *s;
    const struct block *b;
    const struct matrix *following; /* the next block's first one */
    const struct row *rows;
    int64_t number, index, mixed, score_count, threads, several, together; /* `index`, `mixed`: blocks with attention, with delta rules before */
    const float *cosines, *sines;
    float *hidden, *normed, *added, *query, *key, *value, *attended, *gate, *up, *latents, *low, *sums, *mixing, *scores;
    int64_t *counts;
};

#include "attention.h"

/* --- linear layers, and what follows them piece by piece --- */

struct NAME(linears) {
    const struct matrix *m[3];
    const float *x;
    int64_t rows, count;
    float *y[3];
    const float *sums;
    const struct rounded *rounded;
    const struct matrix *next; /* that is multiplied afterwards */
    float *target;      /* [rows][out]: gets y[0] added, if it is not NULL */
    int32_t activation; /* of y[0], and its product with y[1], or ACTIVATION_NONE */
};

static void NAME(linear_piece)(const void *job, int64_t piece, int64_t thread) {
    const struct NAME(linears) *l = job;
    (void)thread;
    if (l->activation != ACTIVATION_NONE || l->target) { /* all matrices have as many outputs */
        const int64_t out = l->m[0]->out, from = piece * GROUP, count = from + GROUP < out ? GROUP : out - from;
        for (int64_t index = 0; index < l->count; index++)
            NAME(outputs_of)(l->m[index], piece, l->x, l->rows, l->y[index], l->sums, l->rounded, l->next);
        for (int64_t place = from; place < l->rows * out; place += out)
            if (l->target) NAME(add_to)(l->target + place, l->y[0] + place, count);
            else NAME(activate)(l->activation, l->y[0] + place, l->count > 1 ? l->y[1] + place : NULL, count);
        return;
    }
    int64_t index = 0;
    for (; piece >= GROUPS(l->m[index]); index++) piece -= GROUPS(l->m[index]);
    const struct matrix *next = index + 1 < l->count ? l->m[index + 1] : l->next;
    NAME(outputs_of)(l->m[index], piece, l->x, l->rows, l->y[index], l->sums, l->rounded, next);
}

/* Products with the same rows, which all matrices round or none; what offsets are multiplied with is in `sums`. */
static void NAME(linear)(const struct NAME(state) *w, struct NAME(linears) l) {
    int64_t pieces = 0;
    for (int64_t index = 0; index < l.count; index++) {
        if (l.activation == ACTIVATION_NONE && !l.target) pieces += GROUPS(l.m[index]);
        else pieces = GROUPS(l.m[index]);
    }
    struct rounded rounded;
    if (l.m[0]->rounds) {
        rounded = NAME(round_rows)(l.m, l.count, l.x, l.rows, w->sums);
        l.rounded = &rounded;
    }
    if (!l.rounded) NAME(prepare)(l.m, l.count, l.x, l.rows, w->sums);
    l.sums = l.rounded ? rounded.blocks : w->sums;
    do_pieces(w->threads, NAME(linear_piece), &l, pieces);
}

/* y += B (A x) for the rows of each adapter that changes this layer. */
static void NAME(adapt)(const struct NAME(state) *w, const struct change *changes, int64_t count, int32_t layer,
                        const float *x, float *y) {
    for (int64_t index = 0; index < count; index++) {
        const struct change *c = changes + index;
        if (c->layer != layer) continue;
        float *low = w->scores, *high = low + c->rows * c->down.out;
        NAME(multiply)(&c->down, x + c->first * c->down.in, c->rows, low, NULL, 1);
        NAME(multiply)(&c->up, low, c->rows, high, NULL, w->threads);
        float *into = y + c->first * c->up.out;
        for (int64_t place = 0; place < c->rows * c->up.out; place++) into[place] += high[place];
    }
}

#include "latent.h"

/* --- experts (Fedus et al. 2021; as Mixtral, Qwen3-MoE, gpt-oss and DeepSeek-V3 choose them) --- */

/* The largest of `count` values, of equal ones the first. */
INLINE int64_t NAME(largest)(const float *values, int64_t count) {
    int64_t best = 0;
    for (int64_t index = 1; index < count; index++)
        if (values[index] > values[best]) best = index;
    return best;
}

/* Leaves of `choice` the groups whose two largest values have the largest sums; of the softmax's shares, whose largest are the
 * largest (DeepSeek-V2). */
static void NAME(keep_groups)(const struct shape *s, float *choice, int64_t all) {
    float sums[MOST_CHOSEN];
    const int64_t size = all / s->groups;
    for (int64_t group = 0; group < s->groups; group++) {
        const float *own = choice + group * size;
        float first = -LARGEST, second = -LARGEST;
        for (int64_t e = 0; e < size; e++)
            if (own[e] > first) second = first, first = own[e];
            else if (own[e] > second) second = own[e];
        sums[group] = s->routing == ROUTING_SOFTMAX ? first : first + second;
    }
    for (int64_t left = s->kept; left; left--) sums[NAME(largest)(sums, s->groups)] = -LARGEST;
    for (int64_t e = 0; e < all; e++)
        if (sums[e / size] != -LARGEST) choice[e] = -LARGEST;
}

/* Of one row the router's outputs, made shares: 0 or more of the chosen experts, -1 of the others. `choice` [experts]. */
static void NAME(route)(const struct shape *s, const struct block *b, float *share, float *choice) {
    const int64_t all = b->experts;
    int64_t picked[MOST_CHOSEN];
    float own[MOST_CHOSEN], total = 0.0f;
    if (s->routing == ROUTING_SOFTMAX) NAME(softmax)(share, 1, all, NULL);
    else if (s->routing == ROUTING_SIGMOID)
        for (int64_t e = 0; e < all; e++) share[e] = 1.0f / (1.0f + exponential(-share[e]));
    for (int64_t e = 0; e < all; e++) choice[e] = b->favours ? share[e] + b->favours[e] : share[e];
    if (s->groups > 1) NAME(keep_groups)(s, choice, all);
    for (int64_t k = 0; k < s->chosen; k++) {
        picked[k] = NAME(largest)(choice, all);
        choice[picked[k]] = -LARGEST;
        own[k] = share[picked[k]];
        if (s->routing == ROUTING_CHOSEN) own[k] = exponential(own[k] - share[picked[0]]);
        total += own[k];
    }
    for (int64_t e = 0; e < all; e++) share[e] = -1.0f;
    for (int64_t k = 0; k < s->chosen; k++) share[picked[k]] = own[k] / (s->shares_add_up ? total : 1.0f) * s->routed_scale;
}

/* What `up` [rows][half] is of gates and ups in turns, `both` [rows][2 half] (gpt-oss). */
static void NAME(clamped)(const struct shape *s, const float *both, int64_t count, float *up) {
    for (int64_t index = 0; index < count; index++) {
        float gate = both[2 * index], more = both[2 * index + 1];
        gate = gate > s->limit ? s->limit : gate;
        more = more > s->limit ? s->limit : more < -s->limit ? -s->limit : more;
        up[index] = (more + 1.0f) * (gate / (1.0f + exponential(-s->alpha * gate)));
    }
}

/* Adds to `added` what the expert makes of `normed` that all tokens share. */
static void NAME(shared_expert)(const struct NAME(state) *w) {
    const struct block *b = w->b;
    NAME(linear)(w, (struct NAME(linears)){.m = {&b->gate, &b->up}, .x = w->normed, .rows = w->number, .count = 2,
                                           .y = {w->gate, w->up}, .activation = w->s->activation, .next = &b->down});
    for (int64_t r = 0; b->shared && r < w->number; r++) {
        const float share = 1.0f / (1.0f + exponential(-NAME(dot)(w->normed + r * w->s->hidden, b->shared, w->s->hidden)));
        for (int64_t index = 0; index < b->up.out; index++) w->gate[r * b->up.out + index] *= share;
    }
    NAME(linear)(w, (struct NAME(linears)){.m = {&b->down}, .x = w->gate, .rows = w->number, .count = 1,
                                           .y = {w->attended}, .next = w->following, .target = w->added});
}

/* What the chosen experts make of `normed`, into `added`. An expert's weights are read once for all rows that chose it. */
static void NAME(experts)(const struct NAME(state) *w) {
    const struct shape *s = w->s;
    const struct block *b = w->b;
    const int64_t all = b->experts, hidden = s->hidden, number = w->number;
    float *shares = w->scores, *choice = shares + number * all, *given = w->query, *made = w->attended; /* free by now, and large enough */
    NAME(multiply)(&b->router, w->normed, number, shares, w->sums, 1);
    for (int64_t r = 0; r < number; r++) NAME(route)(s, b, shares + r * all, choice);
    ask_for_experts(b, shares, number, w->counts);
    memset(w->added, 0, number * hidden * sizeof(float));
    for (int64_t e = 0; e < all; e++) {
        const struct matrix *of = b->expert + 3 * e;
        int64_t count = 0;
        for (int64_t r = 0; r < number; r++)
            if (shares[r * all + e] >= 0.0f) memcpy(given + hidden * count++, w->normed + r * hidden, hidden * sizeof(float));
        if (!count) continue;
        const int apart = of[1].codes != NULL;
        NAME(linear)(w, (struct NAME(linears)){.m = {of, of + 1}, .x = given, .rows = count, .count = 1 + apart, .y = {w->gate, w->up},
                                               .activation = apart ? s->activation : ACTIVATION_NONE, .next = of + 2});
        if (!apart) NAME(clamped)(s, w->gate, count * of[2].in, w->up);
        NAME(linear)(w, (struct NAME(linears)){.m = {of + 2}, .x = apart ? w->gate : w->up, .rows = count, .count = 1, .y = {made},
                                               .next = of + 2});
        count = 0;
        for (int64_t r = 0; r < number; r++) {
            float share = shares[r * all + e];
            if (share < 0.0f) continue;
            const float *from = made + hidden * count++;
            for (int64_t index = 0; index < hidden; index++) w->added[r * hidden + index] += share * from[index];
        }
    }
}

#include "recurrent.h"

/* --- the step --- */

/* What the rows look at, into `attended`. */
static void NAME(attention)(const struct NAME(state) *w, const struct change *changes, int64_t changed) {
    const struct block *b = w->b;
    const int64_t number = w->number, heads = w->s->kv_heads, dim = w->s->head_dim, gated = b->query.out > b->output.in;
    float *query = gated ? w->gate : w->query;
    NAME(linear)(w, (struct NAME(linears)){.m = {&b->query, &b->key, &b->value}, .x = w->normed, .rows = number,
                                           .count = 3, .y = {query, w->key, w->value}, .next = &b->output});
    NAME(adapt)(w, changes, changed, LAYER_QUERY, w->normed, query);
    NAME(adapt)(w, changes, changed, LAYER_KEY, w->normed, w->key);
    NAME(adapt)(w, changes, changed, LAYER_VALUE, w->normed, w->value);
    for (int64_t r = 0; b->whole && r < number; r++) {
        NAME(rms_norm)(w->query + r * b->query.out, b->query_norm, b->query.out, w->s->eps, w->query + r * b->query.out);
        NAME(rms_norm)(w->key + r * b->key.out, b->key_norm, b->key.out, w->s->eps, w->key + r * b->key.out);
    }
    for (int64_t head = 0; gated && head < number * w->s->heads; head++) {
        memcpy(w->query + head * dim, query + 2 * head * dim, dim * sizeof(float));
        memcpy(w->up + head * dim, query + (2 * head + 1) * dim, dim * sizeof(float));
    }
    if (w->several) { /* a token looks at those before it that are computed beside it */
        do_pieces(w->threads, NAME(hold_piece), w, number * heads);
        do_pieces(w->threads, NAME(attend_piece), w, (number + w->together - 1) / w->together * heads);
    } else do_pieces(w->threads, NAME(attention_piece), w, number * heads);
    if (!gated) return;
    NAME(activate)(ACTIVATION_LOGISTIC, w->up, w->attended, number * b->output.in);
    memcpy(w->attended, w->up, number * b->output.in * sizeof(float));
}

/* The layer's output in `added`, through its norm if it has one, onto `hidden`. */
static void NAME(take_over)(const struct NAME(state) *w, const float *norm) {
    if (norm) NAME(norm_rows)(w->s, w->added, norm, NULL, w->number, w->added);
    NAME(add_to)(w->hidden, w->added, w->number * w->s->hidden);
}

static void NAME(one_block)(const struct NAME(state) *w, const struct change *changes, int64_t changed) {
    const struct shape *s = w->s;
    const struct block *b = w->b;
    const int64_t number = w->number, gated = b->gate.codes != NULL;
    const struct matrix *widening = b->experts ? &b->router : gated ? &b->gate : &b->up;
    NAME(norm_rows)(s, w->hidden, b->input_norm, b->input_bias, number, w->normed);
    if (b->delta) NAME(mix)(w);
    else if (s->latent) NAME(latent_attention)(w, changes, changed);
    else NAME(attention)(w, changes, changed);
    int apart = b->attention_norm || changed; /* the sum with `hidden` waits for all outputs */
    NAME(linear)(w, (struct NAME(linears)){.m = {&b->output}, .x = w->attended, .rows = number, .count = 1,
                                           .y = {w->added}, .next = widening, .target = apart ? NULL : w->hidden});
    if (apart) {
        NAME(adapt)(w, changes, changed, LAYER_OUTPUT, w->attended, w->added);
        NAME(take_over)(w, b->attention_norm);
    }
    NAME(norm_rows)(s, w->hidden, b->output_norm, b->output_bias, number, w->normed);
    if (b->experts) {
        NAME(experts)(w);
        if (b->up.codes) NAME(shared_expert)(w);
        NAME(take_over)(w, b->mlp_norm);
        return;
    }
    const int64_t inner = b->up.out;
    struct NAME(linears) in = {.m = {&b->gate, &b->up}, .x = w->normed, .rows = number, .count = 2,
                               .y = {w->gate, w->up}, .next = &b->down, .activation = changed ? ACTIVATION_NONE : s->activation};
    if (!gated) in.m[0] = &b->up, in.count = 1;
    NAME(linear)(w, in);
    if (changed) {
        if (gated) NAME(adapt)(w, changes, changed, LAYER_GATE, w->normed, w->gate);
        NAME(adapt)(w, changes, changed, LAYER_UP, w->normed, gated ? w->up : w->gate);
        NAME(activate)(s->activation, w->gate, gated ? w->up : NULL, number * inner);
    }
    apart = b->mlp_norm || changed;
    NAME(linear)(w, (struct NAME(linears)){.m = {&b->down}, .x = w->gate, .rows = number, .count = 1,
                                           .y = {w->added}, .next = w->following, .target = apart ? NULL : w->hidden});
    if (apart) {
        NAME(adapt)(w, changes, changed, LAYER_DOWN, w->gate, w->added);
        NAME(take_over)(w, b->mlp_norm);
    }
}

static void NAME(step)(const struct step *t, int64_t threads) {
    const struct shape *s = t->shape;
    const int64_t number = t->number;
    const struct widths width = widths_of(s);
    struct NAME(state) w = {.s = s, .rows = t->rows, .number = number, .threads = threads, .several = t->several,
                            .together = t->several ? most(ATTENDED * s->kv_heads / s->heads, 1) : 1, .cosines = t->cosines,
                            .sines = t->sines, .hidden = t->hidden, .counts = t->counts,
                            .score_count = own_count(s, t->score_count)};
    w.normed = t->scratch;
    w.added = w.normed + number * s->hidden;
    w.query = w.added + number * s->hidden;
    w.attended = w.query + number * width.wide;
    w.key = w.attended + number * width.wide;
    w.value = w.key + number * width.narrow;
    w.gate = w.value + number * width.narrow;
    w.up = w.gate + number * s->inner;
    w.latents = w.up + number * s->inner;
    w.low = w.latents + number * width.latents;
    w.sums = w.low + number * s->low;
    w.mixing = w.sums + number * SCRATCH_FLOATS(width.most);
    w.scores = w.mixing + number * s->mixing;
    for (int64_t index = 0, done = 0; index < t->count; index++) {
        int64_t changed = 0;
        while (done + changed < t->changed && t->changes[done + changed].block == index) changed++;
        w.b = t->blocks + index;
        w.following = index + 1 < t->count ? w.b[1].delta ? w.b[1].delta->projection : &w.b[1].query : &w.b->down;
        NAME(one_block)(&w, t->changes + done, changed);
        if (w.b->delta) w.mixed++;
        else w.index++;
        done += changed;
    }
}
