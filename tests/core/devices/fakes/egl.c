/* libEGL.so.1: devices, displays and contexts that store their device but draw nothing. As in the real library,
 * extension functions are only available through eglGetProcAddress. In addition to machine.h's variables, it reads
 *
 *   FAKE_EGL_ORDER  the devices, for example "2,3,0,1,-1": the number of a GPU, -1 for Mesa's software device, or
 *                   100 + n for Mesa's device of GPU n, which has no CUDA ordinal and cannot be initialized; default:
 *                   the GPUs by number, then the software device
 *   FAKE_EGL_LACKS  extensions that GPUs lack: any of "uuid,drm,cuda"
 *   FAKE_EGL_FAULT  fault of the query for devices: "crash"; "hang"; "exit", which ends the process with status 0;
 *                   "chatter", lines on standard output; or "missing" for a library without the function
 */
#include <stdint.h>

#include "machine.h"

typedef void *Handle;
typedef unsigned Bool;

enum { FALSE = 0, TRUE = 1 };
enum { SUCCESS = 0x3000, NOT_INITIALIZED = 0x3001, BAD_ATTRIBUTE = 0x3004, BAD_PARAMETER = 0x300C };
enum { EXTENSIONS = 0x3055, DRM_FILE = 0x3233, RENDER_NODE = 0x3377, CUDA_DEVICE = 0x323A, UUID = 0x335C };
enum { DEVICE_OF_DISPLAY = 0x322C, PLATFORM_DEVICE = 0x313F };
enum { SOFTWARE = -1, MESA = 100, MAX_DEVICES = 64 };

/* A device's handle points to its number and does not depend on the order. A display is its device's handle. */
static int gpus[MAX_GPUS] = {0, 1, 2, 3, 4, 5, 6, 7};
static int mesa[MAX_GPUS] = {100, 101, 102, 103, 104, 105, 106, 107};
static int software = SOFTWARE;

/* The error of the last failed call, until eglGetError returns it. */
static int error = SUCCESS;

static Bool fail(int code) {
    error = code;
    return FALSE;
}

static int number_of(Handle device) { return *(int *)device; }
static int is_gpu(Handle device) { return number_of(device) >= 0 && number_of(device) < MESA; }

static int lacks(const char *extension) {
    char entry[16];
    for (int place = 0; entry_of(getenv("FAKE_EGL_LACKS"), ',', place, entry, sizeof entry); place++)
        if (!strcmp(entry, extension)) return 1;
    return 0;
}

static int list_devices(Handle devices[MAX_DEVICES]) {
    char entry[16];
    const char *order = getenv("FAKE_EGL_ORDER");
    int count = 0;
    if (!order) {
        for (; count < count_gpus(); count++) devices[count] = &gpus[count];
        devices[count++] = &software;
        return count;
    }
    for (; *order && count < MAX_DEVICES && entry_of(order, ',', count, entry, sizeof entry); count++) {
        int number = atoi(entry);
        devices[count] = number == SOFTWARE ? &software : number >= MESA ? &mesa[number - MESA] : &gpus[number];
    }
    return count;
}

static Bool query_devices(int most, Handle *devices, int *count) {
    Handle found[MAX_DEVICES];
    const char *fault = getenv("FAKE_EGL_FAULT");
    log_call("eglQueryDevicesEXT");
    if (fault && !strcmp(fault, "crash")) {
        fputs("the driver begins\nthe driver has crashed\n", stderr);
        abort();
    }
    if (fault && !strcmp(fault, "hang")) sleep(600);
    if (fault && !strcmp(fault, "exit")) _exit(0);
    if (fault && !strcmp(fault, "chatter")) puts("the driver says hello");
    int listed = list_devices(found);
    if (devices && most < 1) return fail(BAD_PARAMETER);
    *count = devices && most < listed ? most : listed;
    if (devices) memcpy(devices, found, (size_t)*count * sizeof *devices);
    return TRUE;
}

static const char *query_string(Handle device, int name) {
    static char text[256];
    if (name == EXTENSIONS) {
        if (device == &software) return "EGL_MESA_device_software";
        int drm = !lacks("drm"), gpu = is_gpu(device);
        snprintf(text, sizeof text, "EGL_EXT_device_query%s%s%s",
                 drm ? " EGL_EXT_device_drm EGL_EXT_device_drm_render_node" : "",
                 gpu && !lacks("cuda") ? " EGL_NV_device_cuda" : "",
                 gpu && !lacks("uuid") ? " EGL_EXT_device_persistent_id" : "");
        return text;
    }
    if (device == &software || lacks("drm")) {
        fail(BAD_PARAMETER);
        return NULL;
    }
    int node = number_of(device) % MESA;
    if (name == DRM_FILE)
        snprintf(text, sizeof text, "/dev/dri/card%d", node);
    else if (name == RENDER_NODE)
        snprintf(text, sizeof text, "/dev/dri/renderD%d", 128 + node);
    else {
        fail(BAD_PARAMETER);
        return NULL;
    }
    return text;
}

/* As in the real driver, only GPUs that CUDA shows have an ordinal, which depends on the mask. */
static Bool query_attribute(Handle device, int name, intptr_t *value) {
    int visible[MAX_GPUS], count = visible_gpus(visible);
    if (name == CUDA_DEVICE && is_gpu(device) && !lacks("cuda"))
        for (int ordinal = 0; ordinal < count; ordinal++)
            if (visible[ordinal] == number_of(device)) {
                *value = ordinal;
                return TRUE;
            }
    return fail(BAD_ATTRIBUTE);
}

static Bool query_binary(Handle device, int name, int size, void *value, int *written) {
    if (name != UUID || !is_gpu(device) || lacks("uuid")) return fail(BAD_PARAMETER);
    *written = 16;
    if (value && size >= 16) uuid_bytes(number_of(device), value);
    return TRUE;
}

static Handle get_display(unsigned platform, Handle device, const int *attributes) {
    (void)attributes;
    if (platform == PLATFORM_DEVICE && device) return device;
    fail(BAD_PARAMETER);
    return NULL;
}

static Bool query_display(Handle display, int name, Handle *value) {
    if (name != DEVICE_OF_DISPLAY) return fail(BAD_ATTRIBUTE);
    *value = display;
    return TRUE;
}

void (*eglGetProcAddress(const char *name))(void) {
    static const struct {
        const char *name;
        void (*function)(void);
    } functions[] = {
        {"eglQueryDeviceStringEXT", (void (*)(void))query_string},
        {"eglQueryDeviceAttribEXT", (void (*)(void))query_attribute},
        {"eglQueryDeviceBinaryEXT", (void (*)(void))query_binary},
        {"eglGetPlatformDisplayEXT", (void (*)(void))get_display},
        {"eglQueryDisplayAttribEXT", (void (*)(void))query_display},
        {"eglQueryDevicesEXT", (void (*)(void))query_devices},
    };
    const char *fault = getenv("FAKE_EGL_FAULT");
    if (fault && !strcmp(fault, "missing") && !strcmp(name, "eglQueryDevicesEXT")) return NULL;
    for (size_t place = 0; place < sizeof functions / sizeof *functions; place++)
        if (!strcmp(functions[place].name, name)) return functions[place].function;
    return NULL;
}

int eglGetError(void) {
    int last = error;
    error = SUCCESS;
    return last;
}

const char *eglQueryString(Handle display, int name) {
    (void)display;
    return name == EXTENSIONS ? "EGL_EXT_client_extensions EGL_EXT_device_base EGL_EXT_platform_device" : "fake";
}

Bool eglInitialize(Handle display, int *major, int *minor) {
    if (number_of(display) >= MESA) return fail(NOT_INITIALIZED);
    if (major) *major = 1;
    if (minor) *minor = 5;
    return TRUE;
}

/* One context for all, so that a renderer's constructor succeeds. */
static int context;

Bool eglTerminate(Handle display) { return display != NULL; }
Bool eglReleaseThread(void) { return TRUE; }
Bool eglBindAPI(unsigned api) { return api != 0; }
Handle eglGetCurrentContext(void) { return NULL; }
Bool eglMakeCurrent(Handle display, Handle draw, Handle read, Handle current) {
    (void)draw, (void)read, (void)current;
    return display != NULL;
}
Bool eglChooseConfig(Handle display, const int *attributes, Handle *configs, int size, int *count) {
    (void)attributes;
    if (configs && size > 0) configs[0] = display;
    *count = 1;
    return TRUE;
}
Handle eglCreateContext(Handle display, Handle config, Handle shared, const int *attributes) {
    (void)display, (void)config, (void)shared, (void)attributes;
    return &context;
}
Bool eglDestroyContext(Handle display, Handle destroyed) { return display && destroyed; }

/* For tests only: returns the number of a display's GPU, -1 for the software device. */
int fake_gpu_of(Handle display) { return number_of(display); }
