/* A toy simulator: a damped value that an action pushes and a random generator shakes. Each variant, chosen with
   -DVARIANT=<NAME>, mishandles a second instance or process in another way. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    GOOD, BACKGROUND_THREAD, NULL_FOR_SECOND, NULL_FOR_LATER, CRASH_OF_SECOND, EXIT_OF_SECOND, ABORT_IN_STEP,
    CLOSE_KILLS_OTHERS, CRASH_OF_LAST_CLOSE, SHARED_GLOBALS, SHARED_RANDOM, SHARED_AT_RESET, SHARED_LATER, LAZY_TABLE,
    CLOSE_CHANGES_OTHERS, LAST_CLOSE_CHANGES_LATER, SEEDED_BY_CLOCK, NOTHING_SEEN, NULL_ALWAYS, CRASH_IN_STEP,
    LOCK_IN_CWD, LOCK_IN_TMPDIR, LOCK_NEXT_TO_LIBRARY, LOCK_PER_PROCESS, STATE_IN_FILES, SHARED_MEMORY, HANG_OF_SECOND
};

typedef struct {
    double value;
    unsigned random;
    int steps, number;
} Sim;

static int alive, made;
static Sim global;
static unsigned global_random = 1, last_seed = 1;
static double *table, gain = 1;

static void advance(Sim *sim, double action, unsigned *random, double by) {
    *random = *random * 1664525u + 1013904223u;
    sim->value = 0.95 * sim->value + by * action + (*random >> 16) % 1000 / 1000.0 - 0.5;
}

/* A background thread serves all instances, with a queue of length one. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t asked = PTHREAD_COND_INITIALIZER, answered = PTHREAD_COND_INITIALIZER;
static Sim *job;
static double job_action;
static void *work(void *unused) {
    pthread_mutex_lock(&mutex);
    for (;;) {
        while (!job) pthread_cond_wait(&asked, &mutex);
        advance(job, job_action, &job->random, 1);
        job = NULL;
        pthread_cond_signal(&answered);
    }
    return unused;
}
static void ask(Sim *sim, double action) {
    pthread_mutex_lock(&mutex);
    job = sim;
    job_action = action;
    pthread_cond_signal(&asked);
    while (job) pthread_cond_wait(&answered, &mutex);
    pthread_mutex_unlock(&mutex);
}

static Sim *shared_memory(void) {
    int file = shm_open(SHARED_MEMORY_NAME, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(Sim))) return NULL;
    Sim *sim = mmap(NULL, sizeof(Sim), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return sim == MAP_FAILED ? NULL : sim;
}

static int try_lock(void) {
    char path[4096] = "simulator.lock";
    Dl_info here;
    dladdr((void *)try_lock, &here);
    if (VARIANT == LOCK_IN_TMPDIR) snprintf(path, sizeof path, "%s/simulator.lock", getenv("TMPDIR"));
    if (VARIANT == LOCK_NEXT_TO_LIBRARY) snprintf(path, sizeof path, "%s.lock", here.dli_fname);
    int file = open(path, O_CREAT | O_RDWR, 0600);
    return file >= 0 && (VARIANT == LOCK_PER_PROCESS ? lockf(file, F_TLOCK, 0) : flock(file, LOCK_EX | LOCK_NB)) == 0;
}

static void access_state_file(Sim *sim, int store) { /* The file name is unique in this process only. */
    char path[64];
    snprintf(path, sizeof path, "simulator%d.state", sim->number);
    int file = open(path, O_CREAT | O_RDWR, 0600);
    if (store ? pwrite(file, &sim->value, sizeof(double), 0) : pread(file, &sim->value, sizeof(double), 0)) {}
    close(file);
}

void *sim_new(void) {
    if (VARIANT == NULL_ALWAYS || (VARIANT == NULL_FOR_SECOND && alive)) return NULL;
    if (VARIANT == NULL_FOR_LATER && made && !alive) return NULL;
    if (VARIANT == CRASH_OF_SECOND && alive) *(volatile int *)0 = 1;
    if (VARIANT == HANG_OF_SECOND) pthread_mutex_lock(&mutex);
    if (VARIANT == EXIT_OF_SECOND && alive) {
        fprintf(stderr, "toy simulator: the license is for one instance\n");
        exit(3);
    }
    if (VARIANT >= LOCK_IN_CWD && VARIANT <= LOCK_PER_PROCESS && !try_lock()) return NULL;
    pthread_t thread;
    if (VARIANT == BACKGROUND_THREAD && !made) pthread_create(&thread, NULL, work, NULL);
    Sim *sim = VARIANT == SHARED_GLOBALS ? &global : VARIANT == SHARED_MEMORY ? shared_memory() : calloc(1, sizeof(Sim));
    if (VARIANT == CLOSE_KILLS_OTHERS && !table)
        table = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    sim->number = made++;
    alive++;
    return sim;
}

/* Seed 0 continues with the state of the generator. */
void sim_reset(void *handle, unsigned seed) {
    Sim *sim = handle;
    sim->value = 0;
    if (VARIANT == SHARED_AT_RESET) {
        if (seed) last_seed = seed;
        sim->random = last_seed * 7919u + 1;
    }
    if (seed) sim->random = seed * 7919u + 1;
    if (VARIANT == SHARED_RANDOM && seed) global_random = seed * 7919u + 1;
    if (VARIANT == SEEDED_BY_CLOCK) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        sim->random = now.tv_nsec;
    }
}

void sim_step(void *handle, double action, double *observation) {
    Sim *sim = handle;
    sim->steps++;
    if (VARIANT == ABORT_IN_STEP && alive > 1) abort();
    if (VARIANT == CRASH_IN_STEP && sim->steps == 5) *(volatile int *)0 = 1;
    if (VARIANT == CLOSE_KILLS_OTHERS) table[0]++;
    int global_one = VARIANT == SHARED_RANDOM || (VARIANT == SHARED_LATER && sim->steps > 50);
    if (VARIANT == LAZY_TABLE && !table) {
        table = &gain;
        gain = 1 + sim->random % 97;
    }
    if (VARIANT == STATE_IN_FILES && sim->steps > 1) access_state_file(sim, 0);
    if (VARIANT == BACKGROUND_THREAD) ask(sim, action);
    else advance(sim, action, global_one ? &global_random : &sim->random, gain);
    if (VARIANT == STATE_IN_FILES) access_state_file(sim, 1);
    observation[0] = VARIANT == NOTHING_SEEN ? 0 : sim->value;
    observation[1] = VARIANT == NOTHING_SEEN ? 0 : sim->random / 4294967296.0;
}

void sim_free(void *handle) {
    alive--;
    if (VARIANT == CLOSE_KILLS_OTHERS) {
        munmap(table, 4096);
        table = (double *)16;
    }
    if (VARIANT == CLOSE_CHANGES_OTHERS) gain = 0;
    if (VARIANT == LAST_CLOSE_CHANGES_LATER && !alive) gain = 0.5;
    if (VARIANT == CRASH_OF_LAST_CLOSE && made > 1 && !alive) abort();
    if (VARIANT != SHARED_GLOBALS && VARIANT != SHARED_MEMORY) free(handle);
}
