/* NVML: what the driver tells of the cards to whoever asks, with or without a context. It sees the books of all
 * processes, and the neighbour as a process with the number 1. A handle names a board, or the one slice of it. */
#include "played.h"

#include <string.h>

enum {
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    GPU_IS_LOST = 15,
};
#define SLICE 0x100

typedef struct {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
} Listed;

typedef struct {
    unsigned pid;
    unsigned long long used_bytes;
} ListedBefore; /* 450 */

static int device_of(void *handle) {
    return ((int)(uintptr_t)handle & (SLICE - 1)) - 1;
}

static int is_slice(void *handle) {
    return ((uintptr_t)handle & SLICE) != 0;
}

static void *handle_of(int device) {
    return (void *)(uintptr_t)(device + 1);
}

static int reach(int device) {
    return books->cards[device].error ? GPU_IS_LOST : 0;
}

#define REACH(handle)                          \
    do {                                       \
        int error_ = reach(device_of(handle)); \
        if (error_)                            \
            return error_;                     \
    } while (0)

/* ---- the library */

int nvmlInit_v2(void) {
    return settings.nvml_error;
}

int nvmlInit(void) {
    return nvmlInit_v2();
}

int nvmlInitWithFlags(unsigned flags) {
    return nvmlInit_v2();
}

int nvmlShutdown(void) {
    return 0;
}

const char *nvmlErrorString(int error) {
    switch (error) {
    case 0:
        return "Success";
    case 1:
        return "Uninitialized";
    case INVALID_ARGUMENT:
        return "Invalid Argument";
    case NOT_SUPPORTED:
        return "Not Supported";
    case 4:
        return "Insufficient Permissions";
    case NOT_FOUND:
        return "Not Found";
    case INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case 9:
        return "Driver Not Loaded";
    case 12:
        return "NVML Shared Library Not Found";
    case GPU_IS_LOST:
        return "GPU is lost";
    case 18:
        return "Driver/library version mismatch";
    default:
        return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, settings.driver_version < RUNTIME_VERSION ? "535.54.03" : "580.65.06");
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = settings.driver_version;
    return 0;
}

int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size) {
    return NOT_FOUND; /* as in a container, where the process's own folder has to be read */
}

/* ---- finding a card */

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = settings.num_devices;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if ((int)index >= settings.num_devices)
        return INVALID_ARGUMENT;
    *handle = handle_of(index);
    return reach(index);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **handle) {
    char id[32];
    for (int i = 0; i < settings.num_devices; i++) {
        write_bus_id(i, id, sizeof id);
        if (!strstr(text, id + 5)) /* the domain may have more digits */
            continue;
        *handle = handle_of(i);
        return reach(i);
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    REACH(handle);
    if (is_slice(handle))
        write_uuid(device_of(handle), text, size);
    else
        write_board_uuid(device_of(handle), text, size);
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *text, void **handle) {
    char id[64];
    for (int i = 0; i < settings.num_devices; i++) {
        void *candidates[] = {handle_of(i), (void *)((uintptr_t)handle_of(i) | SLICE)};
        for (int j = 0; j < 1 + settings.mig; j++) {
            if (nvmlDeviceGetUUID(candidates[j], id, sizeof id) || strcmp(text, id))
                continue;
            *handle = candidates[j];
            return 0;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    *index = device_of(handle);
    return 0;
}

/* ---- slices */

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *after_reset) {
    REACH(handle);
    if (settings.cards[device_of(handle)].major < 8)
        return NOT_SUPPORTED;
    *now = *after_reset = settings.mig;
    return 0;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    *count = settings.mig ? 7 : 0;
    return 0;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **slice) {
    REACH(handle);
    if (!settings.mig)
        return NOT_SUPPORTED;
    if (index)
        return NOT_FOUND;
    *slice = (void *)((uintptr_t)handle | SLICE);
    return 0;
}

int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is) {
    *is = is_slice(handle);
    return 0;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *slice, void **handle) {
    *handle = handle_of(device_of(slice));
    return 0;
}

/* ---- what a card is */

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    REACH(handle);
    snprintf(text, size, "%s", settings.cards[device_of(handle)].name);
    char *slice = strstr(text, " MIG ");
    if (slice && !is_slice(handle))
        *slice = 0;
    return 0;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    REACH(handle);
    *major = settings.cards[device_of(handle)].major;
    *minor = settings.cards[device_of(handle)].minor;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *total_free_used) {
    REACH(handle);
    const Card *card = &settings.cards[device_of(handle)];
    uint64_t total = settings.mig && !is_slice(handle) ? card->board_bytes : card->total_bytes;
    total_free_used[0] = total;
    total_free_used[2] = used_bytes(device_of(handle));
    total_free_used[1] = total - total_free_used[2];
    return 0;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, unsigned long long *version_total_reserved_free_used) {
    unsigned long long simple[3];
    int error = nvmlDeviceGetMemoryInfo(handle, simple);
    if (error)
        return error;
    version_total_reserved_free_used[1] = simple[0];
    version_total_reserved_free_used[2] = 0;
    version_total_reserved_free_used[3] = simple[1];
    version_total_reserved_free_used[4] = simple[2];
    return 0;
}

/* ---- instruments */

/* FP32 cores: 64 of each multiprocessor of a data centre GPU before Hopper and of Turing, 128 of the others. A slice's board has more
 * of them in proportion to its memory. */
int nvmlDeviceGetNumGpuCores(void *handle, unsigned *count) {
    REACH(handle);
    const Card *card = &settings.cards[device_of(handle)];
    int with_64 = card->major == 7 || (card->major == 8 && card->minor == 0);
    uint64_t slices = settings.mig ? card->board_bytes / card->total_bytes : 1;
    *count = card->num_multiprocessors * slices * (with_64 ? 64 : 128);
    return 0;
}

/* Of a slice alone: how many multiprocessors it has, six counts of engines and slices, and its memory in MiB */
int nvmlDeviceGetAttributes_v2(void *handle, unsigned *attributes) {
    REACH(handle);
    if (!is_slice(handle))
        return INVALID_ARGUMENT;
    const Card *card = &settings.cards[device_of(handle)];
    memset(attributes, 0, 40);
    attributes[0] = card->num_multiprocessors;
    attributes[6] = attributes[7] = 1;
    ((unsigned long long *)attributes)[4] = card->total_bytes / MIB;
    return 0;
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *mw) {
    REACH(handle);
    *mw = settings.cards[device_of(handle)].power_limit_mw;
    return 0;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *mw) {
    REACH(handle);
    *mw = power_mw(device_of(handle));
    return 0;
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *mj) {
    REACH(handle);
    if (settings.cards[device_of(handle)].major < 7)
        return NOT_SUPPORTED;
    *mj = energy_mj(device_of(handle));
    return 0;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) {
    REACH(handle);
    unsigned played = books->cards[device_of(handle)].temperature_c;
    *celsius = played ? played : 45;
    return 0;
}

int nvmlDeviceGetTemperatureV(void *handle, unsigned *version_sensor_celsius) {
    return nvmlDeviceGetTemperature(handle, 0, &version_sensor_celsius[2]);
}

int nvmlDeviceGetClockInfo(void *handle, int type, unsigned *mhz) {
    REACH(handle);
    const Card *card = &settings.cards[device_of(handle)];
    *mhz = type == 2 ? card->memory_clock_mhz : card->sm_clock_mhz;
    return 0;
}

int nvmlDeviceGetMaxClockInfo(void *handle, int type, unsigned *mhz) {
    return nvmlDeviceGetClockInfo(handle, type, mhz);
}

static int is_in_use(int device) {
    for (int i = 0; i < MAX_PROCESSES; i++)
        if (is_alive(&books->processes[i]) && books->processes[i].context_bytes[device])
            return 1;
    return 0;
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned *gpu_and_memory) {
    REACH(handle);
    int device = device_of(handle), used = is_in_use(device);
    CardState *card = &books->cards[device];
    gpu_and_memory[0] = card->utilization ? card->utilization - 1 : used ? 50 : 0;
    gpu_and_memory[1] = card->memory_utilization ? card->memory_utilization - 1 : used ? 20 : 0;
    return 0;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
    REACH(handle);
    *reasons = books->cards[device_of(handle)].throttle_reasons;
    return 0;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(handle, reasons);
}

/* ---- processes */

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Listed *list) {
    REACH(handle);
    int device = device_of(handle);
    unsigned places = *count, found = 0;
    uint64_t neighbour = books->cards[device].neighbour_bytes;
    for (int i = -1; i < MAX_PROCESSES; i++) {
        Process *process = i < 0 ? NULL : &books->processes[i];
        if (process ? !is_alive(process) || !process->context_bytes[device] : !neighbour)
            continue;
        uint64_t used = process ? process->held_bytes[device] + process->context_bytes[device] : neighbour;
        if (list && found < places)
            list[found] = (Listed){process ? process->pid : 1, used, -1u, -1u};
        found++;
    }
    *count = found;
    return found > places ? INSUFFICIENT_SIZE : 0;
}

int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, Listed *list) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, list);
}

int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, ListedBefore *list) {
    Listed found[MAX_PROCESSES + 1];
    unsigned places = *count;
    *count = MAX_PROCESSES + 1;
    int error = nvmlDeviceGetComputeRunningProcesses_v3(handle, count, found);
    if (error)
        return error;
    if (*count > places)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++)
        list[i] = (ListedBefore){found[i].pid, found[i].used_bytes};
    return 0;
}

int nvmlDeviceGetProcessUtilization(void *handle, void *samples, unsigned *count, unsigned long long since_us) {
    *count = 0;
    return NOT_FOUND;
}

/* ---- links between cards: none */

int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) {
    return NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *info) {
    return NOT_SUPPORTED;
}

int nvmlDeviceGetGpuFabricInfoV(void *handle, void *info) {
    memset((char *)info + 4, 0, 24);
    return 0;
}
