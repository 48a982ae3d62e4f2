/* libcuda.so.1: the functions that report the order of the GPUs. In addition to machine.h's variables, it reads
 *
 *   FAKE_CUDA_FAIL  error code that cuInit returns
 *
 * Every cuInit is logged in FAKE_LOG, because a process that has called it can no longer fork.
 */
#include "machine.h"

enum { SUCCESS = 0, NOT_INITIALIZED = 3, INVALID_DEVICE = 101 };

static int started = 0;

int cuInit(unsigned flags) {
    (void)flags;
    log_call(__func__);
    const char *code = getenv("FAKE_CUDA_FAIL");
    if (code) return atoi(code);
    started = 1;
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    int gpus[MAX_GPUS];
    if (!started) return NOT_INITIALIZED;
    *count = visible_gpus(gpus);
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    int gpus[MAX_GPUS];
    if (!started) return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= visible_gpus(gpus)) return INVALID_DEVICE;
    *device = gpus[ordinal];
    return SUCCESS;
}

int cuDeviceGetUuid(unsigned char *bytes, int device) {
    if (!started) return NOT_INITIALIZED;
    uuid_bytes(device, bytes);
    return SUCCESS;
}
