/* Prints the digests of vectors.h, one line for each instruction set that this processor has, or for those that are named:
 * they are equal on all of them but `plain`, which rounds products and sums apart.
 *
 *     digests SEED PRODUCTS STEPS [NAME ...]      e.g. 1 200 50 avx2 avx512
 */
#include "../../node/blocks/kernels/kernels.c"

#include <stdio.h>
#include <string.h>

static int is_among(const char *name, char **names, int count) {
    while (count--) if (!strcmp(name, names[count])) return 1;
    return 0;
}

int main(int count, char **arguments) {
    static const char *const names[] = {"plain", "plainfma", "avx2", "avxvnni", "avx512", "avx512vnni", "neon", "neondot"};
    if (count < 4) return 2;
    for (int index = 0; index < COUNT(names); index++) {
        if (count > 4 && !is_among(names[index], arguments + 4, count - 4)) continue;
        if (!petalnode_select(names[index])) continue;
        uint64_t found[2];
        petalnode_vectors(strtoull(arguments[1], NULL, 10), atoi(arguments[2]), atoi(arguments[3]), found);
        printf("%s %016llx %016llx\n", names[index], (unsigned long long)found[0], (unsigned long long)found[1]);
    }
    return 0;
}
