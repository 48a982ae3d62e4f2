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

/* The standard requires these functions. They are not called. */
#define UNUSED(name) int fmi2##name(void) { return REFUSED; }
UNUSED(GetInteger) UNUSED(GetBoolean) UNUSED(GetString) UNUSED(SetInteger) UNUSED(SetBoolean) UNUSED(SetString)
UNUSED(GetFMUstate) UNUSED(SetFMUstate) UNUSED(FreeFMUstate) UNUSED(SerializedFMUstateSize) UNUSED(SerializeFMUstate)
UNUSED(DeSerializeFMUstate) UNUSED(GetDirectionalDerivative) UNUSED(SetRealInputDerivatives) UNUSED(CancelStep)
UNUSED(GetRealOutputDerivatives) UNUSED(GetStatus) UNUSED(GetRealStatus) UNUSED(GetIntegerStatus)
UNUSED(GetBooleanStatus) UNUSED(GetStringStatus)
