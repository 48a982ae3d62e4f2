/* The fake machine of the three libraries. Environment variables describe it. They are read at each call, so that one
 * process can test many machines:
 *
 *   FAKE_GPUS           number of GPUs, at most 8; they are numbered by PCI address
 *   FAKE_NAMES          their names, separated by commas; "NVIDIA H100" for those that are not listed
 *   FAKE_FASTEST_FIRST  their numbers in CUDA's default order
 *   FAKE_LOG            file to which calls that tests count append a line "<function> <process id>"
 *
 * The top of each source describes the variables that only one library reads.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_GPUS = 8 };

static int count_gpus(void) {
    const char *text = getenv("FAKE_GPUS");
    int count = text ? atoi(text) : 0;
    return count > MAX_GPUS ? MAX_GPUS : count;
}

/* Copies entry `place` of a list; returns 0 if the list has fewer entries. */
static int entry_of(const char *list, char separator, int place, char *entry, size_t size) {
    for (; list && place > 0; place--) {
        list = strchr(list, separator);
        list = list ? list + 1 : NULL;
    }
    if (!list) return 0;
    const char *end = strchr(list, separator);
    snprintf(entry, size, "%.*s", (int)(end ? end - list : (long)strlen(list)), list);
    return 1;
}

static void uuid_of(int gpu, char *text, size_t size) {
    static const char *heads[MAX_GPUS] = {"aaaa0000", "aaaa1111", "bbbb2222", "cccc3333",
                                           "dddd4444", "eeee5555", "ffff6666", "0a0a7777"};
    snprintf(text, size, "GPU-%s-0000-4000-8000-%012d", heads[gpu], gpu);
}

/* Converts the hexadecimal digits of a GPU's UUID to 16 bytes. */
static inline void uuid_bytes(int gpu, unsigned char *bytes) {
    char text[64];
    uuid_of(gpu, text, sizeof text);
    int digits = 0;
    for (const char *c = text + strlen("GPU-"); *c; c++) {
        if (*c == '-') continue;
        int value = *c <= '9' ? *c - '0' : *c - 'a' + 10;
        bytes[digits / 2] = (unsigned char)(digits % 2 ? bytes[digits / 2] | value : value << 4);
        digits++;
    }
}

static int gpu_of_prefix(const char *prefix) {
    int found = -1;
    for (int gpu = 0; gpu < count_gpus(); gpu++) {
        char text[64];
        uuid_of(gpu, text, sizeof text);
        if (strncmp(text, prefix, strlen(prefix))) continue;
        if (found >= 0) return -1; /* fits several */
        found = gpu;
    }
    return found;
}

/* Lists the visible GPUs by CUDA ordinal, under CUDA_DEVICE_ORDER and CUDA_VISIBLE_DEVICES. */
static inline int visible_gpus(int gpus[MAX_GPUS]) {
    char entry[512];
    const char *by_pci = getenv("CUDA_DEVICE_ORDER");
    const char *fastest = by_pci && !strcmp(by_pci, "PCI_BUS_ID") ? NULL : getenv("FAKE_FASTEST_FIRST");
    int order[MAX_GPUS];
    for (int place = 0; place < count_gpus(); place++)
        order[place] = entry_of(fastest, ',', place, entry, sizeof entry) ? atoi(entry) : place;

    const char *mask = getenv("CUDA_VISIBLE_DEVICES");
    if (!mask) {
        memcpy(gpus, order, sizeof order);
        return count_gpus();
    }
    int count = 0;
    for (int place = 0; entry_of(mask, ',', place, entry, sizeof entry); place++) {
        char *end = entry;
        long number = strtol(entry, &end, 10);
        int gpu = -1;
        if (!strncmp(mask, "GPU-", 4))
            gpu = strncmp(entry, "GPU-", 4) ? -1 : gpu_of_prefix(entry);
        else if (end != entry && number >= 0 && number < count_gpus())
            gpu = order[number];
        if (gpu < 0) break; /* CUDA reads up to the first invalid entry */
        for (int seen = 0; seen < count; seen++)
            if (gpus[seen] == gpu) return 0; /* CUDA shows no GPU if one is listed twice */
        gpus[count++] = gpu;
    }
    return count;
}

static void log_call(const char *function) {
    const char *path = getenv("FAKE_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (!log) return;
    fprintf(log, "%s %d\n", function, (int)getpid());
    fclose(log);
}
