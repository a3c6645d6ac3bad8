/* Prints the digests of vectors.h, one line for each instruction set that this processor has, or for those that are named:
 * they are equal on all of them but `plain`, which rounds products and sums apart.
 *
 *     digests SEED PRODUCTS STEPS [NAME ...]      e.g. 1 20000 200 avx2 avx512; seed 0: those of docs/exact.md
 *     digests SEED NAME                           the answers of some steps as they are, float32, without digests
 */
#define _GNU_SOURCE /* as kernels.c, before all else */
#include <stdio.h>

static FILE *answers;
#define ALSO(values, count) if (answers) fwrite(values, sizeof *(values), (size_t)(count), answers)
#ifdef EMULATED
#include "emulated.h"
#endif
#include "../../node/blocks/kernels/kernels.c"

/* The kernels of this name are computed with from here on. */
static int taken(const char *name) {
#ifdef EMULATED
    static const struct kernels *const all[] = {&kernels_avxvnni, &kernels_avx512, &kernels_avx512vnni};
    for (int index = 0; index < COUNT(all); index++)
        if (!strcmp(name, all[index]->name)) return chosen = all[index], 1;
    return 0;
#else
    return petalnode_select(name) != NULL;
#endif
}

static int is_among(const char *name, char **names, int count) {
    while (count--) if (!strcmp(name, names[count])) return 1;
    return 0;
}

int main(int count, char **arguments) {
    static const char *const names[] = {"plain", "plainfma", "avx2", "avxvnni", "avx512", "avx512vnni", "neon", "neondot"};
    if (count < 3) return 2;
    uint64_t found[2], seed = strtoull(arguments[1], NULL, 10);
    if (count == 3) {
        answers = stdout;
        if (!taken(arguments[2])) return 3;
        petalnode_many(seed, 0, 1, found);
        return 0;
    }
    for (int index = 0; index < COUNT(names); index++) {
        if (count > 4 && !is_among(names[index], arguments + 4, count - 4)) continue;
        if (!taken(names[index])) continue;
        if (seed) petalnode_many(seed, atoi(arguments[2]), atoi(arguments[3]), found);
        else petalnode_vectors(1, 95, 24, found);
        printf("%s %016llx %016llx\n", names[index], (unsigned long long)found[0], (unsigned long long)found[1]);
    }
    return 0;
}
