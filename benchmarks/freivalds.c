/* What Freivalds' test would leave of the products of a block with 4-bit weights and rounded activations.
 *
 *     gcc -std=gnu11 -O3 -march=native -ffp-contract=off -fno-math-errno -pthread benchmarks/freivalds.c -o build/freivalds
 *     build/freivalds [ROUNDS]
 *
 * The seven matrices of a block of Mistral 7B in Q4_0, one thread, the least of ROUNDS. `product`: what a server and a
 * validator compute today. `test`: each block of 32 inputs has one whole number for an output; who says that it has
 * computed these sends them (16 bits), a random combination of them is compared (its right value costs one product with
 * a vector for each matrix, not counted here), and what follows them in float32 is computed as the kernels do. */
#include "../node/blocks/kernels/kernels.c"

#include <stdio.h>
#include <time.h>

typedef int16_t sums_of_tile __attribute__((vector_size(2 * LANES)));
typedef int32_t wide __attribute__((vector_size(4 * LANES)));
typedef float reals __attribute__((vector_size(4 * LANES)));

static double milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

/* As `byte_tile`, where the whole numbers are given. `factors`: of the outputs, random. */
static wide tested(const sums_of_tile *given, const reals *scales, const float *steps, const float *moved, const wide *factors,
                   int64_t tiles, int64_t blocks, reals *y) {
    wide together = {0};
    for (int64_t tile = 0; tile < tiles; tile++) {
        reals total = {0};
        wide found = {0};
        for (int64_t block = 0; block < blocks; block++) {
            const wide sum = __builtin_convertvector(given[tile * blocks + block], wide);
            const reals scale = scales[tile * blocks + block];
            found += sum * factors[tile];
            total = total + scale * steps[block] * __builtin_convertvector(sum, reals);
            total = total + scale * -8.0f * moved[block];
        }
        together ^= found; /* stands for the comparison of each block's combination */
        y[tile] = total;
    }
    return together;
}

int main(int count, char **arguments) {
    static const int64_t shapes[][2] = {{4096, 4096}, {1024, 4096}, {1024, 4096}, {4096, 4096}, {14336, 4096}, {14336, 4096}, {4096, 14336}};
    const int rounds = count > 1 ? atoi(arguments[1]) : 5;
    const char *best[] = {"avx512vnni", "avxvnni", "avx2", "neondot", "neon"};
    int chosen = 0;
    while (chosen < COUNT(best) && !petalnode_select(best[chosen])) chosen++;
    if (chosen == COUNT(best)) return 1;
    for (int64_t rows = 1; rows <= 32; rows += 31) {
        double product = 0, test = 0;
        int64_t sent = 0;
        for (int which = 0; which < COUNT(shapes); which++) {
            const int64_t out = shapes[which][0], in = shapes[which][1], blocks = in / 32, tiles = out / LANES;
            state = 1;
            struct matrix m = matrix(FORM_Q4_HALF, out, in, 0, 0);
            m.rounds = 1;
            float *x = floats(rows * in, 0), *y = floats(rows * (out + LANES), 0), *scratch = floats(rows * SCRATCH_FLOATS(in), 0);
            sums_of_tile *given = aligned_alloc(64, (size_t)(2 * out * blocks * rows));
            reals *scales = aligned_alloc(64, (size_t)(4 * out * blocks)), *made = aligned_alloc(64, (size_t)(4 * out));
            wide *factors = aligned_alloc(64, (size_t)(4 * out)), seen = {0};
            for (int64_t at = 0; at < out * blocks * rows; at++) ((int16_t *)given)[at] = (int16_t)drawn();
            for (int64_t at = 0; at < out * blocks; at++) ((float *)scales)[at] = value(0);
            for (int64_t at = 0; at < out; at++) ((int32_t *)factors)[at] = (int32_t)drawn();
            double first = 1e9, second = 1e9;
            for (int round = 0; round < rounds; round++) {
                double begun = milliseconds();
                petalnode_multiply(&m, x, rows, y, scratch, 1);
                const double done = milliseconds();
                for (int64_t row = 0; row < rows; row++)
                    seen ^= tested(given + row * tiles * blocks, scales, x, x + blocks, factors, tiles, blocks, made);
                const double end = milliseconds();
                if (done - begun < first) first = done - begun;
                if (end - done < second) second = end - done;
            }
            digest ^= (uint64_t)seen[0];
            product += first, test += second, sent += 2 * out * blocks;
            free(given), free(scales), free(made), free(factors);
            forget(0);
        }
        printf("%s, %lld rows: product %.2f ms, test %.2f ms (%.2f), %.1f MB sent for a row (%llx)\n", best[chosen], (long long)rows,
               product, test, test / product, (double)sent / 1e6, (unsigned long long)digest);
    }
    return 0;
}
