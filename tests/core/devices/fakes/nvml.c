/* libnvidia-ml.so.1: the functions that pynvml, torch and this project call. Besides machine.h's variables it reads
 *
 *   FAKE_MIG        MIG slices by GPU, "0=MIG-a,,MIG-b;2=MIG-c"; an empty one is a place that is not taken
 *   FAKE_PROCESSES  what runs on GPUs, "<gpu>:<process id>:<MiB>:<C or G>", separated by commas
 *   FAKE_NVML_FAIL  functions that fail and their error codes, "nvmlDeviceGetName=999,nvmlShutdown=1"
 */
#include "machine.h"

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { MOST_SLICES = 7 };

/* A handle is a number: a GPU's is its number + 1, a slice's adds its place + 1 times this. */
enum { SLICE = 16 };
#define GPU_OF(handle) ((int)((long)(handle) % SLICE) - 1)
#define SLICE_OF(handle) ((int)((long)(handle) / SLICE) - 1)

typedef struct {
    char old_address[16];
    unsigned domain, bus, device, model, subsystem;
    char address[32];
} Pci;

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned instance, compute_instance;
} Process;

static int started = 0;

static int failure(const char *function) {
    char code[16];
    return value_of(getenv("FAKE_NVML_FAIL"), ',', function, code, sizeof code) ? atoi(code) : SUCCESS;
}

#define CHECK()                                     \
    do {                                            \
        int code = failure(__func__);               \
        if (code) return code;                      \
        if (started < 1) return UNINITIALIZED;      \
    } while (0)

static int start(const char *function) {
    note(function);
    int code = failure(function);
    if (!code) started++;
    return code;
}

int nvmlInit(void) { return start(__func__); }
int nvmlInit_v2(void) { return start(__func__); }
int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return start(__func__);
}

int nvmlShutdown(void) {
    note(__func__);
    CHECK();
    started--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    switch (code) {
        case UNINITIALIZED: return "Uninitialized";
        case NOT_SUPPORTED: return "Not Supported";
        case 4: return "Insufficient Permissions";
        case 9: return "Driver Not Loaded";
        case 15: return "GPU is lost";
        case 18: return "Driver/library version mismatch";
        default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    CHECK();
    snprintf(text, size, "575.51.03");
    return SUCCESS;
}

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
    char gib[32];
    int gpu = GPU_OF(handle), listed = entry_of(getenv("FAKE_FREE_GIB"), ',', gpu, gib, sizeof gib);
    memory->total = 80ull << 30;
    memory->free = (unsigned long long)(listed ? atoi(gib) : 80 - gpu) << 30;
    memory->used = memory->total - memory->free;
    return SUCCESS;
}

/* Copies the UUID of a GPU's slice; returns 0 where the place is empty. */
static int slice(int gpu, int place, char *text, size_t size) {
    char slices[512], name[8];
    snprintf(name, sizeof name, "%d", gpu);
    return value_of(getenv("FAKE_MIG"), ';', name, slices, sizeof slices) && entry_of(slices, ',', place, text, size) &&
           *text;
}

int nvmlDeviceGetUUID(long handle, char *text, unsigned size) {
    CHECK();
    if (SLICE_OF(handle) >= 0) return slice(GPU_OF(handle), SLICE_OF(handle), text, size) ? SUCCESS : NOT_FOUND;
    uuid_of(GPU_OF(handle), text, size);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(long handle, unsigned *current, unsigned *pending) {
    CHECK();
    char name[8], slices[512];
    snprintf(name, sizeof name, "%d", GPU_OF(handle));
    if (!getenv("FAKE_MIG")) return NOT_SUPPORTED;
    *current = *pending = (unsigned)value_of(getenv("FAKE_MIG"), ';', name, slices, sizeof slices);
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(long handle, unsigned *count) {
    (void)handle;
    CHECK();
    *count = MOST_SLICES;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(long handle, unsigned place, long *found) {
    CHECK();
    char text[96];
    if (!slice(GPU_OF(handle), (int)place, text, sizeof text)) return NOT_FOUND;
    *found = handle + SLICE * (long)(place + 1);
    return SUCCESS;
}

/* NVML's protocol: too small an array is answered by the size that is needed. */
static int list_processes(long handle, char kind, unsigned *count, Process *processes) {
    char entry[64];
    unsigned found = 0, room = *count;
    for (int place = 0; entry_of(getenv("FAKE_PROCESSES"), ',', place, entry, sizeof entry); place++) {
        int gpu;
        unsigned pid;
        unsigned long long mib;
        char letter;
        if (sscanf(entry, "%d:%u:%llu:%c", &gpu, &pid, &mib, &letter) != 4) continue;
        if (gpu != GPU_OF(handle) || letter != kind) continue;
        if (processes && found < room) processes[found] = (Process){pid, mib << 20, ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > room || (found && !processes) ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(long handle, unsigned *count, Process *processes) {
    CHECK();
    return list_processes(handle, 'C', count, processes);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(long handle, unsigned *count, Process *processes) {
    CHECK();
    return list_processes(handle, 'G', count, processes);
}
