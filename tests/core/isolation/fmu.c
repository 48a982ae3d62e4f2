/* A co-simulation FMU after the FMI 2.0 standard: one state that decays and that the input pushes. All instances share
   the state, as simulators do whose description says canBeInstantiatedOnlyOncePerProcess. */
#include <stddef.h>
#include <stdlib.h>

#define DONE 0
#define REFUSED 3

static double state, input;
static int instance;

const char *fmi2GetTypesPlatform(void) { return "default"; }
const char *fmi2GetVersion(void) { return "2.0"; }
int fmi2SetDebugLogging(void *c, int on, size_t n, const char *const categories[]) {
    return (void)c, (void)on, (void)n, (void)categories, DONE;
}
void *fmi2Instantiate(const char *name, int type, const char *guid, const char *resources, const void *callbacks,
                      int visible, int logging) {
    (void)name, (void)type, (void)guid, (void)resources, (void)callbacks, (void)visible, (void)logging;
    return &instance;
}
void fmi2FreeInstance(void *c) { (void)c; }
int fmi2SetupExperiment(void *c, int has_tolerance, double tolerance, double start, int has_stop, double stop) {
    return (void)c, (void)has_tolerance, (void)tolerance, (void)start, (void)has_stop, (void)stop, DONE;
}
int fmi2EnterInitializationMode(void *c) { return (void)c, DONE; }
int fmi2ExitInitializationMode(void *c) { return (void)c, DONE; }
int fmi2Terminate(void *c) { return (void)c, DONE; }
int fmi2Reset(void *c) { return (void)c, state = input = 0, DONE; }
int fmi2GetReal(void *c, const unsigned *references, size_t n, double *values) {
    for (size_t i = 0; i < n; i++) values[i] = references[i] ? input : state;
    return (void)c, DONE;
}
int fmi2SetReal(void *c, const unsigned *references, size_t n, const double *values) {
    for (size_t i = 0; i < n; i++) *(references[i] ? &input : &state) = values[i];
    return (void)c, DONE;
}
int fmi2DoStep(void *c, double time, double step, int no_set_state) {
    (void)c, (void)time, (void)no_set_state;
    state += step * (input - 0.5 * state);
    return DONE;
}

/* The standard wants them to be there. */
int fmi2GetInteger(void *c, const unsigned *r, size_t n, int *v) { return (void)c, (void)r, (void)n, (void)v, REFUSED; }
int fmi2GetBoolean(void *c, const unsigned *r, size_t n, int *v) { return (void)c, (void)r, (void)n, (void)v, REFUSED; }
int fmi2GetString(void *c, const unsigned *r, size_t n, char **v) { return (void)c, (void)r, (void)n, (void)v, REFUSED; }
int fmi2SetInteger(void *c, const unsigned *r, size_t n, int *v) { return (void)c, (void)r, (void)n, (void)v, REFUSED; }
int fmi2SetBoolean(void *c, const unsigned *r, size_t n, int *v) { return (void)c, (void)r, (void)n, (void)v, REFUSED; }
int fmi2SetString(void *c, const unsigned *r, size_t n, char **v) { return (void)c, (void)r, (void)n, (void)v, REFUSED; }
int fmi2GetFMUstate(void *c, void **s) { return (void)c, (void)s, REFUSED; }
int fmi2SetFMUstate(void *c, void *s) { return (void)c, (void)s, REFUSED; }
int fmi2FreeFMUstate(void *c, void **s) { return (void)c, (void)s, REFUSED; }
int fmi2SerializedFMUstateSize(void *c, void *s, size_t *n) { return (void)c, (void)s, (void)n, REFUSED; }
int fmi2SerializeFMUstate(void *c, void *s, char b[], size_t n) { return (void)c, (void)s, (void)b, (void)n, REFUSED; }
int fmi2DeSerializeFMUstate(void *c, char b[], size_t n, void **s) {
    return (void)c, (void)s, (void)b, (void)n, REFUSED;
}
int fmi2GetDirectionalDerivative(void *c, unsigned u[], size_t m, unsigned k[], size_t n, double *d, double *e) {
    return (void)c, (void)u, (void)m, (void)k, (void)n, (void)d, (void)e, REFUSED;
}
int fmi2SetRealInputDerivatives(void *c, unsigned r[], size_t n, int o[], double *v) {
    return (void)c, (void)r, (void)n, (void)o, (void)v, REFUSED;
}
int fmi2GetRealOutputDerivatives(void *c, unsigned r[], size_t n, int o[], double *v) {
    return (void)c, (void)r, (void)n, (void)o, (void)v, REFUSED;
}
int fmi2CancelStep(void *c) { return (void)c, REFUSED; }
int fmi2GetStatus(void *c, int k, int *v) { return (void)c, (void)k, (void)v, REFUSED; }
int fmi2GetRealStatus(void *c, int k, double *v) { return (void)c, (void)k, (void)v, REFUSED; }
int fmi2GetIntegerStatus(void *c, int k, int *v) { return (void)c, (void)k, (void)v, REFUSED; }
int fmi2GetBooleanStatus(void *c, int k, int *v) { return (void)c, (void)k, (void)v, REFUSED; }
int fmi2GetStringStatus(void *c, int k, char **v) { return (void)c, (void)k, (void)v, REFUSED; }
