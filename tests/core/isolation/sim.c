/* A toy simulator: a damped value that an action pushes and a random generator shakes. Each variant, chosen with
   -D<NAME>, bears a second instance, or a second process, in its own bad way. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    double value;
    unsigned random;
    int steps, number;
} Sim;

static int alive, made;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static unsigned draw(unsigned *random) { return *random = *random * 1664525u + 1013904223u; }

static void advance(Sim *sim, double action, unsigned *random, double gain) {
    sim->value = 0.95 * sim->value + gain * action + (draw(random) >> 16) % 1000 / 1000.0 - 0.5;
}

#ifdef BACKGROUND_THREAD /* one for all instances, with a queue of one */
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
#endif

#ifdef SHARED_MEMORY
static Sim *shared_memory(void) {
    int file = shm_open(SHARED_MEMORY_NAME, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(Sim))) return NULL;
    Sim *sim = mmap(NULL, sizeof(Sim), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return sim == MAP_FAILED ? NULL : sim;
}
#endif

#if defined(LOCK_IN_CWD) || defined(LOCK_IN_TMPDIR) || defined(LOCK_BESIDE_LIBRARY) || defined(LOCK_PER_PROCESS)
static int locked(void) {
    char path[4096] = "simulator.lock";
#if defined(LOCK_IN_TMPDIR)
    snprintf(path, sizeof path, "%s/simulator.lock", getenv("TMPDIR"));
#elif defined(LOCK_BESIDE_LIBRARY)
    Dl_info here;
    dladdr((void *)locked, &here);
    snprintf(path, sizeof path, "%s.lock", here.dli_fname);
#endif
    int file = open(path, O_CREAT | O_RDWR, 0600);
#ifdef LOCK_PER_PROCESS
    return file >= 0 && lockf(file, F_TLOCK, 0) == 0;
#else
    return file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0;
#endif
}
#endif

#ifdef STATE_IN_FILES /* of a name that only this process does not use twice */
static void stored(Sim *sim, int store) {
    char path[64];
    snprintf(path, sizeof path, "simulator%d.state", sim->number);
    int file = open(path, O_CREAT | O_RDWR, 0600);
    if (store ? pwrite(file, &sim->value, sizeof(double), 0) : pread(file, &sim->value, sizeof(double), 0)) {}
    close(file);
}
#endif

#ifdef SHARED_GLOBALS
static Sim global;
#endif
#if defined(SHARED_RANDOM) || defined(SHARED_LATER)
static unsigned global_random = 1;
#endif
#ifdef SHARED_AT_RESET
static unsigned last_seed = 1;
#endif
#if defined(CLOSE_KILLS_OTHERS) || defined(LAZY_TABLE)
static double *table;
#endif
#if defined(CLOSE_CHANGES_OTHERS) || defined(LAST_CLOSE_CHANGES_LATER)
static double gain = 1;
#endif

void *sim_new(void) {
#ifdef NULL_ALWAYS
    return NULL;
#endif
#ifdef NULL_FOR_SECOND
    if (alive) return NULL;
#endif
#ifdef NULL_FOR_LATER
    if (made && !alive) return NULL;
#endif
#ifdef CRASH_OF_SECOND
    if (alive) *(volatile int *)0 = 1;
#endif
#ifdef HANG_OF_SECOND
    pthread_mutex_lock(&mutex);
#endif
#ifdef EXIT_OF_SECOND
    if (alive) {
        fprintf(stderr, "toy simulator: the license is for one instance\n");
        exit(3);
    }
#endif
#if defined(LOCK_IN_CWD) || defined(LOCK_IN_TMPDIR) || defined(LOCK_BESIDE_LIBRARY) || defined(LOCK_PER_PROCESS)
    if (!locked()) return NULL;
#endif
#ifdef BACKGROUND_THREAD
    pthread_t thread;
    if (!made) pthread_create(&thread, NULL, work, NULL);
#endif
    Sim *sim = calloc(1, sizeof(Sim));
#ifdef SHARED_GLOBALS
    sim = &global;
#endif
#ifdef SHARED_MEMORY
    sim = shared_memory();
#endif
#ifdef CLOSE_KILLS_OTHERS
    if (!table) table = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
#endif
    sim->number = made++;
    alive++;
    return sim;
}

/* seed 0: go on with the generator as it is */
void sim_reset(void *handle, unsigned seed) {
    Sim *sim = handle;
    sim->value = 0;
#ifdef SHARED_AT_RESET
    if (seed) last_seed = seed;
    sim->random = last_seed * 7919u + 1;
#endif
    if (seed) sim->random = seed * 7919u + 1;
#ifdef SHARED_RANDOM
    if (seed) global_random = seed * 7919u + 1;
#endif
#ifdef SEEDED_BY_CLOCK
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    sim->random = now.tv_nsec;
#endif
}

void sim_step(void *handle, double action, double *observation) {
    Sim *sim = handle;
    unsigned *random = &sim->random;
    double by = 1;
    sim->steps++;
#ifdef ABORT_IN_STEP
    if (alive > 1) abort();
#endif
#ifdef CRASH_IN_STEP
    if (sim->steps == 5) *(volatile int *)0 = 1;
#endif
#ifdef CLOSE_KILLS_OTHERS
    table[0]++;
#endif
#if defined(CLOSE_CHANGES_OTHERS) || defined(LAST_CLOSE_CHANGES_LATER)
    by = gain;
#endif
#ifdef SHARED_RANDOM
    random = &global_random;
#endif
#ifdef SHARED_LATER
    if (sim->steps > 50) random = &global_random;
#endif
#ifdef LAZY_TABLE
    if (!table) {
        table = malloc(sizeof(double));
        table[0] = 1 + sim->random % 97;
    }
    by = table[0];
#endif
#ifdef STATE_IN_FILES
    if (sim->steps > 1) stored(sim, 0);
#endif
#ifdef BACKGROUND_THREAD
    pthread_mutex_lock(&mutex);
    job = sim;
    job_action = action;
    pthread_cond_signal(&asked);
    while (job) pthread_cond_wait(&answered, &mutex);
    pthread_mutex_unlock(&mutex);
    (void)random, (void)by;
#else
    advance(sim, action, random, by);
#endif
#ifdef STATE_IN_FILES
    stored(sim, 1);
#endif
    observation[0] = sim->value;
    observation[1] = sim->random / 4294967296.0;
#ifdef NOTHING_SEEN
    observation[0] = observation[1] = 0;
#endif
}

void sim_free(void *handle) {
    Sim *sim = handle;
    alive--;
#ifdef CLOSE_KILLS_OTHERS
    munmap(table, 4096);
    table = (double *)16;
#endif
#ifdef CLOSE_CHANGES_OTHERS
    gain = 0;
#endif
#ifdef LAST_CLOSE_CHANGES_LATER
    if (!alive) gain = 0.5;
#endif
#ifdef CRASH_OF_LAST_CLOSE
    if (made > 1 && !alive) abort();
#endif
#if !defined(SHARED_GLOBALS) && !defined(SHARED_MEMORY)
    free(sim);
#endif
    (void)sim;
    (void)mutex;
}
