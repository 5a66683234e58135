// Helpers: threads that take parts of a job off the thread that has it, while a processor has nothing else to do.
//
// They run at the lowest priority, so anything else may take their processor, in the middle of a part, for long. Nobody waits for
// that: a helper works on memory of its own, and its part is copied to where it belongs if it is ready in time; if not, the job's
// thread computes the part again. A part is computed by one thread, and by each in the same way: bits do not depend on helpers.

#ifdef __linux__
#define _GNU_SOURCE // for SCHED_IDLE
#endif
#include "kernels.h"

#ifdef __linux__
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_HELPERS 255
#define PART_BITS 16          // of a range's next part
#define HELPER_BITS 8         // of who has computed a part
#define SPIN_NS 200000        // that a helper looks out for the next job: within a forward they follow each other at once
#define SPINS 32              // between two looks at the clock
#define MAX_OUTPUT_BYTES (INT64_C(64) << 20)
#define REST_NS 20000         // between two looks at whether all helpers rest

// The parts that a thread takes first. A new job's number and the next part are one word: who is late takes nothing.
typedef struct {
    _Alignas(64) _Atomic uint64_t next;
} Range;

typedef struct {
    _Alignas(64) _Atomic int is_working;
    pthread_t thread;
    char *task, *output;
    int number;
} Helper;

static struct {
    _Alignas(64) _Atomic uint64_t job_number;  // odd: it is being written
    _Alignas(64) _Atomic int num_asleep;
    _Atomic int is_taken, is_ending;
    int num_helpers;
    uint32_t float_modes;  // of the job's own thread
    int64_t num_helped, num_again;  // parts that helpers computed, and that were computed again, as a helper's came too late
    Job job;
    char task[MAX_TASK_BYTES];
    char *shared;
    int64_t shared_bytes, output_bytes;  // the latter of each helper
    Range ranges[MAX_HELPERS + 1];           // the last: of the job's own thread
    _Atomic uint64_t ready[MAX_PARTS];       // the job's number and the helper's
    Helper helpers[MAX_HELPERS];
} team;

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static ALWAYS_INLINE void spin(void)
{
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

// How this thread rounds, and what it does with the smallest numbers, which a bit may depend on.
static ALWAYS_INLINE uint32_t float_modes_now(void)
{
#ifdef __x86_64__
    return __builtin_ia32_stmxcsr();
#else
    return 0;
#endif
}

static ALWAYS_INLINE void set_float_modes(uint32_t modes)
{
#ifdef __x86_64__
    __builtin_ia32_ldmxcsr(modes);
#else
    (void)modes;
#endif
}

static void sleep_until_changed(uint64_t job_number)
{
    // the word's low half, which comes first
    syscall(SYS_futex, &team.job_number, FUTEX_WAIT_PRIVATE, (uint32_t)job_number, NULL, NULL, 0);
}

static void wake_all(void)
{
    if (atomic_load(&team.num_asleep))
        syscall(SYS_futex, &team.job_number, FUTEX_WAKE_PRIVATE, MAX_HELPERS, NULL, NULL, 0);
}

// Return the next part of a thread's range, or -1 where there is none, or the job is over.
static int64_t take_from(int64_t range, uint64_t job_number, int64_t num_parts)
{
    const int64_t num_ranges = team.num_helpers + 1, end = num_parts * (range + 1) / num_ranges;
    uint64_t next = atomic_load(&team.ranges[range].next);
    while (next >> PART_BITS == job_number && (int64_t)(next & ((1 << PART_BITS) - 1)) < end)
        if (atomic_compare_exchange_weak(&team.ranges[range].next, &next, next + 1))
            return (int64_t)(next & ((1 << PART_BITS) - 1));
    return -1;
}

// Return a part that nobody has taken: of the thread's own range, then of the others'; `range` is the last one's; -1: none.
static int64_t take(int64_t own, int64_t *range, uint64_t job_number, int64_t num_parts)
{
    const int64_t num_ranges = team.num_helpers + 1;
    for (; *range < num_ranges; ++*range) {
        const int64_t part = take_from((own + *range) % num_ranges, job_number, num_parts);
        if (part >= 0)
            return part;
    }
    return -1;
}

// Return whether all that was read since this job's number belongs to this job.
static int is_still(uint64_t job_number)
{
    atomic_thread_fence(memory_order_acquire);
    return atomic_load(&team.job_number) == job_number;
}

static void work(Helper *self, uint64_t job_number)
{
    const Job job = team.job;
    const uint32_t float_modes = team.float_modes;
    if (!is_still(job_number))
        return;
    memcpy(self->task, team.task, (size_t)job.task_bytes);
    if (!is_still(job_number))
        return;
    set_float_modes(float_modes);
    int64_t range = 0, part;
    while ((part = take(self->number, &range, job_number, job.num_parts)) >= 0) {
        job.compute(self->task, part, self->output, self->output + WHOLE_LINES(job.output_bytes));
        atomic_store(&team.ready[part], job_number << HELPER_BITS | (uint64_t)self->number);
    }
}

static void *help(void *argument)
{
    Helper *self = argument;
    const struct sched_param lowest = {0};
    sched_setscheduler(0, SCHED_IDLE, &lowest);  // of this thread alone; where it is forbidden, helpers are as others
    uint64_t last = 0;
    int64_t since = now_ns();
    while (!atomic_load(&team.is_ending)) {
        const uint64_t job_number = atomic_load(&team.job_number);
        if (job_number != last && job_number % 2 == 0) {
            atomic_store(&self->is_working, 1);
            work(self, job_number);
            atomic_store(&self->is_working, 0);
            last = job_number;
            since = now_ns();
        } else if (now_ns() - since < SPIN_NS) {
            for (int count = 0; count < SPINS && atomic_load(&team.job_number) == job_number; count++)
                spin();
        } else {
            atomic_fetch_add(&team.num_asleep, 1);
            sleep_until_changed(job_number);
            atomic_fetch_sub(&team.num_asleep, 1);
            since = now_ns();
        }
    }
    return NULL;
}

// A process that was forked off, perhaps while another thread wrote a job, has no helpers.
static void forget_helpers(void)
{
    for (int number = 0; number < MAX_HELPERS; number++) {
        atomic_store(&team.helpers[number].is_working, 0);
        team.helpers[number].output = NULL;
    }
    atomic_store(&team.is_ending, 0);
    atomic_store(&team.job_number, (atomic_load(&team.job_number) + 1) / 2 * 2);
    team.num_helpers = 0;
    team.shared = NULL;
    team.shared_bytes = team.output_bytes = 0;
    atomic_store(&team.num_asleep, 0);
    atomic_store(&team.is_taken, 0);
}

static int is_taken_now(void)
{
    return !atomic_exchange(&team.is_taken, 1);
}

static void take_for_sure(void)
{
    const struct timespec moment = {0, REST_NS};
    while (!is_taken_now())
        nanosleep(&moment, NULL);
}

static void give_back(void)
{
    atomic_store(&team.is_taken, 0);
}

// Return whether no helper reads or writes anything of a job that is over.
static int all_rest(void)
{
    for (int number = 0; number < team.num_helpers; number++)
        if (atomic_load(&team.helpers[number].is_working))
            return 0;
    return 1;
}

static void wait_for_rest(void)
{
    const struct timespec moment = {0, REST_NS};
    while (!all_rest())
        nanosleep(&moment, NULL);
}

static void free_memory(void)
{
    free(team.shared);
    team.shared = NULL;
    for (int number = 0; number < team.num_helpers; number++) {
        free(team.helpers[number].output);
        team.helpers[number].output = NULL;
    }
    team.shared_bytes = team.output_bytes = 0;
}

static void end_helpers(void)
{
    atomic_store(&team.is_ending, 1);
    atomic_fetch_add(&team.job_number, 2);
    syscall(SYS_futex, &team.job_number, FUTEX_WAKE_PRIVATE, MAX_HELPERS, NULL, NULL, 0);
    for (int number = 0; number < team.num_helpers; number++) {
        pthread_join(team.helpers[number].thread, NULL);
        free(team.helpers[number].task);
    }
    atomic_store(&team.is_ending, 0);
    free_memory();
    team.num_helpers = 0;
}

static void start_helpers(int64_t count)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the others
    for (; team.num_helpers < count && team.num_helpers < MAX_HELPERS; team.num_helpers++) {
        Helper *helper = team.helpers + team.num_helpers;
        helper->number = team.num_helpers;
        helper->task = malloc(MAX_TASK_BYTES);
        if (!helper->task || pthread_create(&helper->thread, NULL, help, helper)) {
            free(helper->task);
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// Return whether there is memory of these sizes now; more is not had while a helper is late, as that may be for long.
static int has_memory(int64_t shared_bytes, int64_t output_bytes)
{
    if (team.shared_bytes >= shared_bytes && team.output_bytes >= output_bytes)
        return 1;
    shared_bytes = shared_bytes > team.shared_bytes ? shared_bytes : team.shared_bytes;
    output_bytes = output_bytes > team.output_bytes ? output_bytes : team.output_bytes;
    if (!all_rest())
        return 0;
    free_memory();
    int is_there = !posix_memalign((void **)&team.shared, 64, (size_t)shared_bytes);
    for (int number = 0; number < team.num_helpers; number++)
        is_there &= !posix_memalign((void **)&team.helpers[number].output, 64, (size_t)output_bytes);
    if (!is_there) {
        free_memory();
        return 0;
    }
    // a helper that took a page for the first time might lose its processor while it holds what that needs
    for (int number = 0; number < team.num_helpers; number++)
        memset(team.helpers[number].output, 0, (size_t)output_bytes);
    team.shared_bytes = shared_bytes;
    team.output_bytes = output_bytes;
    return 1;
}

// Set how many helpers there are, and return how many there are now.
int64_t specdec_set_helpers(int64_t count)
{
    static int is_told_of_forks;
    take_for_sure();
    if (!is_told_of_forks)
        is_told_of_forks = !pthread_atfork(NULL, NULL, forget_helpers);
    if (count != team.num_helpers) {
        end_helpers();
        start_helpers(count);
    }
    give_back();
    return team.num_helpers;
}

// Wait until helpers read nothing of jobs that are over: before what those read is freed.
void specdec_rest(void)
{
    take_for_sure();
    wait_for_rest();
    give_back();
}

// Write how many parts helpers have computed, and how many were computed again.
void specdec_count_parts(int64_t *helped, int64_t *again)
{
    take_for_sure();
    *helped = team.num_helped;
    *again = team.num_again;
    give_back();
}

// Return memory of `shared_bytes` for what helpers read of a job, each of whom then has an output of `output_bytes` and room of
// `room_bytes`; `specdec_share` must follow. NULL: there is no helper for it.
char *specdec_room_to_share(int64_t shared_bytes, int64_t output_bytes, int64_t room_bytes)
{
    if (!team.num_helpers || output_bytes > MAX_OUTPUT_BYTES || !is_taken_now())
        return NULL;
    if (!team.num_helpers || !has_memory(shared_bytes, WHOLE_LINES(output_bytes) + room_bytes)) {
        give_back();
        return NULL;
    }
    return team.shared;
}

// Publish a job, and return its number.
static uint64_t published(const Job *job)
{
    const uint64_t number = atomic_load(&team.job_number) + 2;
    const int64_t num_ranges = team.num_helpers + 1;
    atomic_store(&team.job_number, number - 1);
    atomic_thread_fence(memory_order_release);
    team.job = *job;
    team.float_modes = float_modes_now();
    memcpy(team.task, job->task, (size_t)job->task_bytes);
    for (int64_t range = 0; range < num_ranges; range++)
        atomic_store(&team.ranges[range].next, number << PART_BITS | (uint64_t)(job->num_parts * range / num_ranges));
    atomic_store(&team.job_number, number);
    wake_all();
    return number;
}

// Return which helper has computed a part, waiting for it up to a time; -1: none.
static int64_t helper_of(int64_t part, uint64_t job_number, int64_t until_ns)
{
    for (;;) {
        const uint64_t ready = atomic_load(&team.ready[part]);
        if (ready >> HELPER_BITS == job_number)
            return (int64_t)(ready & ((1 << HELPER_BITS) - 1));
        if (now_ns() > until_ns)
            return -1;
        spin();
    }
}

// Compute all parts of a job, and give the team back.
void specdec_share(const Job *job)
{
    uint8_t is_mine[MAX_PARTS] = {0};
    const int64_t begin_ns = now_ns();
    const uint64_t job_number = published(job);
    int64_t part, range = 0, num_mine = 0;
    while ((part = take(team.num_helpers, &range, job_number, job->num_parts)) >= 0) {
        job->compute(job->task, part, job->output, job->room);
        is_mine[part] = 1;
        num_mine++;
    }
    // a helper that is still at work has had about as long as it takes
    const int64_t end_ns = now_ns(), mean_ns = (end_ns - begin_ns) / (num_mine ? num_mine : 1);
    const int64_t until_ns = end_ns + 2 * job->unevenness * mean_ns;
    for (part = 0; part < job->num_parts; part++) {
        if (is_mine[part])
            continue;
        const int64_t helper = helper_of(part, job_number, until_ns);
        if (helper < 0) {
            job->compute(job->task, part, job->output, job->room);
            team.num_again++;
        } else {
            job->copy(job->task, part, team.helpers[helper].output, job->output);
            team.num_helped++;
        }
    }
    give_back();
}
#else
int64_t specdec_set_helpers(int64_t count)
{
    (void)count;
    return 0;
}

void specdec_rest(void)
{
}

void specdec_count_parts(int64_t *helped, int64_t *again)
{
    *helped = *again = 0;
}

char *specdec_room_to_share(int64_t shared_bytes, int64_t output_bytes, int64_t room_bytes)
{
    (void)shared_bytes;
    (void)output_bytes;
    (void)room_bytes;
    return NULL;
}

void specdec_share(const Job *job)
{
    (void)job;
}
#endif
