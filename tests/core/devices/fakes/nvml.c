/* libnvidia-ml.so.1: the functions that pynvml, torch and this project call, without failures. Failures of the driver
 * are tested with a fake pynvml. A handle is a GPU's number + 1.
 */
#include "machine.h"

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };

typedef struct {
    char old_address[16];
    unsigned domain, bus, device, model, subsystem;
    char address[32];
} Pci;

typedef struct {
    unsigned long long total, free, used;
} Memory;

#define GPU_OF(handle) ((int)(handle) - 1)

static int started = 0;

#define CHECK() \
    if (started < 1) return UNINITIALIZED

static int start(const char *function) {
    log_call(function);
    started++;
    return SUCCESS;
}

int nvmlInit(void) { return start(__func__); }
int nvmlInit_v2(void) { return start(__func__); }
int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return start(__func__);
}

int nvmlShutdown(void) {
    log_call(__func__);
    CHECK();
    started--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "Unknown Error"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    CHECK();
    *count = (unsigned)count_gpus();
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, long *handle) {
    CHECK();
    if (index >= (unsigned)count_gpus()) return INVALID_ARGUMENT;
    *handle = index + 1;
    return SUCCESS;
}

int nvmlDeviceGetIndex(long handle, unsigned *index) {
    CHECK();
    *index = (unsigned)GPU_OF(handle);
    return SUCCESS;
}

int nvmlDeviceGetName(long handle, char *text, unsigned size) {
    CHECK();
    if (!entry_of(getenv("FAKE_NAMES"), ',', GPU_OF(handle), text, size)) snprintf(text, size, "NVIDIA H100");
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(long handle, Pci *pci) {
    CHECK();
    memset(pci, 0, sizeof *pci);
    pci->bus = 0x1A + 0x10 * (unsigned)GPU_OF(handle);
    snprintf(pci->old_address, sizeof pci->old_address, "0000:%02X:00.0", pci->bus);
    snprintf(pci->address, sizeof pci->address, "00000000:%02X:00.0", pci->bus);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(long handle, Memory *memory) {
    CHECK();
    memory->total = 80ull << 30;
    memory->free = (81ull - (unsigned long long)handle) << 30;
    memory->used = memory->total - memory->free;
    return SUCCESS;
}

int nvmlDeviceGetUUID(long handle, char *text, unsigned size) {
    CHECK();
    uuid_of(GPU_OF(handle), text, size);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(long handle, unsigned *current, unsigned *pending) {
    (void)handle, (void)current, (void)pending;
    return NOT_SUPPORTED;
}
