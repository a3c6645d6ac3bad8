/* Weights in mapped files. Those of experts are asked for as soon as the router has spoken, all of a block's at once. */
#if !defined(_WIN32)
#include <sys/mman.h>

/* The process reads what a mapped file does not have any more: it ends with a sentence, and with the exit code of bad input. */
static void end_at_lost_page(int number) {
    static const char said[] = "\nA file became shorter, or cannot be read, while this process had it mapped. If it is the model's, "
                               "copy or download it again; then run this again.\n";
    const ssize_t told = write(STDERR_FILENO, said, sizeof said - 1);
    (void)number, (void)told;
    _exit(2);
}
#endif

/* Has it end so, unless the program has said what is to happen then. */
static void say_lost_pages(void) {
#if !defined(_WIN32)
    struct sigaction now, own = {.sa_handler = end_at_lost_page};
    if (!sigaction(SIGBUS, NULL, &now) && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL)
        sigaction(SIGBUS, &own, NULL);
#endif
}

#define SEEN_PAGES 512 /* whose state is asked for at a time */

/* Has the system read those of these bytes that are not in memory, and does not wait for them; whether there are such. */
static int ask_for(const struct range *ranges, int64_t count) {
    int absent = 0;
#if defined(_WIN32)
    (void)ranges, (void)count; /* they are read when they are touched */
#else
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    unsigned char seen[SEEN_PAGES];
    for (int64_t index = 0; index < count; index++) {
        const uintptr_t first = (uintptr_t)ranges[index].start & ~(page - 1);
        const uintptr_t end = (uintptr_t)ranges[index].start + (uintptr_t)ranges[index].bytes;
        int missing = 0;
        for (uintptr_t at = first; at < end && !missing; at += SEEN_PAGES * page) {
            const uintptr_t bytes = end - at < SEEN_PAGES * page ? end - at : SEEN_PAGES * page;
            if (mincore((void *)at, bytes, (void *)seen)) return absent; /* no such memory */
            for (uintptr_t k = 0; k < (bytes + page - 1) / page; k++) missing |= !(seen[k] & 1);
        }
        if (!missing) continue;
        absent = 1;
        posix_madvise((void *)first, end - first, POSIX_MADV_WILLNEED);
    }
#endif
    return absent;
}

/* The same of all experts of a block that a row has a share of, 0 or more, in shares [rows][experts]. Adds to `counts` how many
 * these are, and how many of them were not all in memory. */
static void ask_for_experts(const struct block *b, const float *shares, int64_t rows, int64_t *counts) {
    for (int64_t e = 0; e < b->experts; e++) {
        int used = 0;
        for (int64_t r = 0; r < rows; r++) used |= shares[r * b->experts + e] >= 0.0f;
        if (!used) continue;
        counts[0]++;
        if (b->ranges) counts[1] += ask_for(b->ranges + e * b->each, b->each);
    }
}
