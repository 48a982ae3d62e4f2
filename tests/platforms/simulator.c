/* Simulator for dll.py that allows one instance per process, and crashes as the action selects. */
#include <stdlib.h>
#ifdef _WIN32
#include <windows.h>
#define EXPORT __declspec(dllexport)
#else
#include <pthread.h>
#define EXPORT
#endif

enum { CRASH = 1, CRASH_IN_A_THREAD, ABORT, EXIT };

static struct {
    double value;
    unsigned random;
    int alive;
} simulator;

static void crash(void) { *(volatile int *)8 = 1; }

#ifdef _WIN32
static DWORD WINAPI work(void *unused) {
#else
static void *work(void *unused) {
#endif
    crash();
    (void)unused;
    return 0;
}

static void crash_in_a_thread(void) {
#ifdef _WIN32
    WaitForSingleObject(CreateThread(NULL, 0, work, NULL, 0, NULL), INFINITE);
#else
    pthread_t thread;
    pthread_create(&thread, NULL, work, NULL);
    pthread_join(thread, NULL);
#endif
}

EXPORT void *simulator_new(void) {
    if (simulator.alive) return NULL;
    simulator.alive = 1;
    return &simulator;
}

EXPORT void simulator_reset(unsigned seed) {
    simulator.value = 0;
    simulator.random = seed * 7919u + 1;
}

EXPORT double simulator_step(int action) {
    switch (action) {
    case CRASH: crash(); break;
    case CRASH_IN_A_THREAD: crash_in_a_thread(); break;
    case ABORT: abort();
    case EXIT: exit(7);
    }
    simulator.random = simulator.random * 1664525u + 1013904223u;
    return simulator.value = 0.95 * simulator.value + (simulator.random >> 16) % 1000 / 1000.0 - 0.5;
}

EXPORT void simulator_free(void) { simulator.alive = 0; }
