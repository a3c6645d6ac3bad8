/* Threads that help the one that computes. Work is cut into pieces; whoever is free takes the next one. Who took a piece
 * changes nothing in its result, so results do not depend on how many threads there are.
 *
 * The helpers live as long as the process. After a piece they look for the next one for some tens of microseconds, and
 * then sleep; a caller never waits for a helper that has not begun a piece. There is one set of helpers: while one
 * thread of a process has claimed it, others compute alone. A child of a fork has no helpers until it claims its own.
 */
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>
#endif

#define MOST_THREADS 8
#define LOOKS 2000 /* of a helper for a piece before it sleeps, and of a caller before it lets others run */

typedef void piece_work(const void *job, int64_t piece, int64_t thread);

/* `ticket`: number of the job << 40 | threads << 32 | pieces << 16 | pieces taken. `work` and `job` change only while
 * no piece can be taken. */
static struct {
    uint64_t ticket, done;
    piece_work *work;
    const void *job;
    int64_t owner; /* of the helpers: a process */
    int32_t claimed, asleep, helpers;
} pool;

#define TICKET_TAKEN(ticket) ((int64_t)((ticket) & 0xffffu))
#define TICKET_PIECES(ticket) ((int64_t)((ticket) >> 16 & 0xffffu))
#define TICKET_THREADS(ticket) ((int64_t)((ticket) >> 32 & 0xffu))
#define MOST_PIECES 0xffff

#if defined(_WIN32)
static SRWLOCK pool_lock = SRWLOCK_INIT;
static CONDITION_VARIABLE pool_wake = CONDITION_VARIABLE_INIT;
static void lock_pool(void) { AcquireSRWLockExclusive(&pool_lock); }
static void unlock_pool(void) { ReleaseSRWLockExclusive(&pool_lock); }
static void wait_pool(void) { SleepConditionVariableSRW(&pool_wake, &pool_lock, INFINITE, 0); }
static void wake_pool(void) { WakeAllConditionVariable(&pool_wake); }
static void renew_pool(void) {}
static void let_others_run(void) { SwitchToThread(); }
static int64_t this_process(void) { return 1; }
#else
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t pool_wake = PTHREAD_COND_INITIALIZER;
static void lock_pool(void) { pthread_mutex_lock(&pool_lock); }
static void unlock_pool(void) { pthread_mutex_unlock(&pool_lock); }
static void wait_pool(void) { pthread_cond_wait(&pool_wake, &pool_lock); }
static void wake_pool(void) { pthread_cond_broadcast(&pool_wake); }
static void renew_pool(void) {
    pthread_mutex_init(&pool_lock, NULL);
    pthread_cond_init(&pool_wake, NULL);
}
static void let_others_run(void) { sched_yield(); }
static int64_t this_process(void) { return getpid(); }
#endif

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int has_piece(uint64_t ticket, int64_t thread) {
    return thread < TICKET_THREADS(ticket) && TICKET_TAKEN(ticket) < TICKET_PIECES(ticket);
}

/* Takes a piece and does it; false if there is none. */
static int do_piece(int64_t thread) {
    uint64_t ticket = __atomic_load_n(&pool.ticket, __ATOMIC_ACQUIRE);
    do {
        if (!has_piece(ticket, thread)) return 0;
    } while (!__atomic_compare_exchange_n(&pool.ticket, &ticket, ticket + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    pool.work(pool.job, TICKET_TAKEN(ticket), thread);
    __atomic_fetch_add(&pool.done, 1, __ATOMIC_RELEASE);
    return 1;
}

static void help(int64_t thread) {
    for (int looks = 0;;) {
        if (do_piece(thread)) looks = 0;
        else if (++looks < LOOKS) relax();
        else {
            lock_pool();
            for (;;) {
                __atomic_store_n(&pool.asleep, 1, __ATOMIC_SEQ_CST);
                if (has_piece(__atomic_load_n(&pool.ticket, __ATOMIC_SEQ_CST), thread)) break;
                wait_pool();
            }
            unlock_pool();
            looks = 0;
        }
    }
}

#if defined(_WIN32)
static DWORD WINAPI begin_helping(void *thread) {
    help((int64_t)(intptr_t)thread);
    return 0;
}
static int start_helper(int64_t thread) {
    HANDLE handle = CreateThread(NULL, 0, begin_helping, (void *)(intptr_t)thread, 0, NULL);
    return handle && CloseHandle(handle);
}
#else
static void *begin_helping(void *thread) {
    help((int64_t)(intptr_t)thread);
    return NULL;
}
static int start_helper(int64_t thread) {
    pthread_t id;
    sigset_t all, before; /* signals are for the threads that the program knows of */
    sigfillset(&all);
    sigdelset(&all, SIGBUS); /* but this one, which is for who reads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&id, NULL, begin_helping, (void *)(intptr_t)thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) pthread_detach(id);
    return !failed;
}
#endif

/* Claims the helpers for a caller that has use for this number of threads, itself included; how many it has. Ends with
 * `release_threads` if that is more than one. */
static int64_t claim_threads(int64_t wanted) {
    if (wanted > MOST_THREADS) wanted = MOST_THREADS;
    if (wanted < 2) return 1;
    int64_t owner = __atomic_load_n(&pool.owner, __ATOMIC_ACQUIRE), self = this_process();
    if (owner != self) { /* the first time, or a child, whose helpers and claim have stayed with its parent */
        if (owner < 0 || !__atomic_compare_exchange_n(&pool.owner, &owner, -1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return 1;
        renew_pool();
        pool.ticket = pool.done = 0;
        pool.claimed = pool.asleep = pool.helpers = 0;
        __atomic_store_n(&pool.owner, self, __ATOMIC_RELEASE);
    }
    if (__atomic_exchange_n(&pool.claimed, 1, __ATOMIC_ACQUIRE)) return 1;
    while (pool.helpers < wanted - 1 && start_helper(pool.helpers + 1)) pool.helpers++;
    if (pool.helpers < 1) __atomic_store_n(&pool.claimed, 0, __ATOMIC_RELEASE);
    return pool.helpers < wanted - 1 ? pool.helpers + 1 : wanted;
}

static void release_threads(int64_t threads) {
    if (threads > 1) __atomic_store_n(&pool.claimed, 0, __ATOMIC_RELEASE);
}

/* Does pieces 0 .. pieces - 1 of the work with the claimed threads. */
static void do_pieces(int64_t threads, piece_work *work, const void *job, int64_t pieces) {
    if (threads < 2 || pieces < 2 || pieces > MOST_PIECES) {
        for (int64_t piece = 0; piece < pieces; piece++) work(job, piece, 0);
        return;
    }
    pool.work = work;
    pool.job = job;
    __atomic_store_n(&pool.done, 0, __ATOMIC_RELAXED);
    uint64_t number = (__atomic_load_n(&pool.ticket, __ATOMIC_RELAXED) >> 40) + 1;
    uint64_t ticket = number << 40 | (uint64_t)threads << 32 | (uint64_t)pieces << 16;
    __atomic_store_n(&pool.ticket, ticket, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.asleep, __ATOMIC_SEQ_CST) && __atomic_exchange_n(&pool.asleep, 0, __ATOMIC_SEQ_CST)) {
        lock_pool();
        wake_pool();
        unlock_pool();
    }
    while (do_piece(0)) {}
    for (int looks = 0; __atomic_load_n(&pool.done, __ATOMIC_ACQUIRE) < (uint64_t)pieces;)
        if (++looks < LOOKS) relax();
        else let_others_run();
}
