/* libcudart: devices, their properties, and errors. (Memory, kernels and streams have files of their own.) */
#include "played.h"

#include <stdlib.h>
#include <string.h>

/* ---- devices */

int cudaGetDeviceCount(int *count) {
    *count = 0;
    INITIALIZE();
    *count = num_visible;
    return cudaSuccess;
}

int cudaGetDevice(int *device) {
    INITIALIZE();
    *device = current_device;
    return cudaSuccess;
}

int cudaSetDevice(int device) {
    INITIALIZE();
    if (device < 0 || device >= num_visible)
        return failed(cudaErrorInvalidDevice);
    current_device = device;
    return enter();
}

typedef struct {
    int capability; /* 10 * major + minor, and all up to the next */
    int threads_per_multiprocessor, blocks_per_multiprocessor, shared_bytes_per_multiprocessor, shared_bytes_optin;
} Architecture;

static const Architecture *architecture_of(const Card *card) {
    static const Architecture known[] = {
        {90, 2048, 32, 233472, 232448},
        {86, 1536, 16, 102400, 101376},
        {80, 2048, 32, 167936, 166912},
        {75, 1024, 16, 65536, 65536},
    };
    size_t last = sizeof known / sizeof *known - 1;
    for (size_t i = 0; i < last; i++)
        if (known[i].capability <= 10 * card->major + card->minor)
            return &known[i];
    return &known[last];
}

static int attribute_of(int device, int attribute) {
    const Card *card = &settings.cards[device];
    const Architecture *architecture = architecture_of(card);
    switch (attribute) {
    case 1: /* threads of a block */
    case 2: /* its width */
    case 3: /* its height */
        return 1024;
    case 4: /* its depth */
        return 64;
    case 5: /* width of a grid */
        return 2147483647;
    case 6:
    case 7:
        return 65535;
    case 8: /* shared memory of a block */
        return 49152;
    case 9: /* constant memory */
        return 65536;
    case 10: /* threads of a warp */
        return 32;
    case 11: /* pitch */
        return 2147483647;
    case 12: /* registers of a block */
    case 82: /* and of a multiprocessor */
        return 65536;
    case 13: /* clock, kHz */
        return card->sm_clock_mhz * 1000;
    case 14: /* alignment of textures */
        return 512;
    case 16:
        return card->num_multiprocessors;
    case 33: /* PCI bus */
        return device + 1;
    case 36: /* clock of the memory, kHz */
        return card->memory_clock_mhz * 1000;
    case 37: /* width of the memory's bus */
        return 5120;
    case 38:
        return card->l2_bytes;
    case 39:
        return architecture->threads_per_multiprocessor;
    case 40: /* copy engines */
        return 3;
    case 75:
        return card->major;
    case 76:
        return card->minor;
    case 81:
        return architecture->shared_bytes_per_multiprocessor;
    case 97:
        return architecture->shared_bytes_optin;
    case 106:
        return architecture->blocks_per_multiprocessor;
    case 111: /* shared memory that the system keeps of each block */
        return 1024;
    case 19:  /* maps host memory */
    case 31:  /* runs kernels at the same time */
    case 41:  /* one address space */
    case 78:  /* priorities of streams */
    case 83:  /* managed memory */
    case 90:  /* preemption */
    case 95:  /* cooperative launches */
    case 96:
    case 99:  /* host memory can be registered */
    case 102: /* addresses and memory apart, which expandable segments need */
    case 103: /* shared by file descriptors */
    case 115: /* pools of memory */
        return 1;
    default:
        return 0;
    }
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    INITIALIZE();
    if (device < 0 || device >= num_visible)
        return failed(cudaErrorInvalidDevice);
    *value = attribute_of(visible[device], attribute);
    return cudaSuccess;
}

static void describe_multiprocessors(DeviceProperties *properties, int device) {
    properties->major = attribute_of(device, 75);
    properties->minor = attribute_of(device, 76);
    properties->multiprocessor_count = attribute_of(device, 16);
    properties->warp_size = attribute_of(device, 10);
    properties->max_threads_per_block = attribute_of(device, 1);
    for (int i = 0; i < 3; i++) {
        properties->max_threads_dim[i] = attribute_of(device, 2 + i);
        properties->max_grid_size[i] = attribute_of(device, 5 + i);
    }
    properties->max_threads_per_multiprocessor = attribute_of(device, 39);
    properties->max_blocks_per_multiprocessor = attribute_of(device, 106);
    properties->registers_per_block = attribute_of(device, 12);
    properties->registers_per_multiprocessor = attribute_of(device, 82);
    properties->shared_memory_per_block = attribute_of(device, 8);
    properties->shared_memory_per_multiprocessor = attribute_of(device, 81);
    properties->shared_memory_per_block_optin = attribute_of(device, 97);
    properties->reserved_shared_memory_per_block = attribute_of(device, 111);
}

static void describe_memory(DeviceProperties *properties, int device) {
    properties->total_global_memory = settings.cards[device].total_bytes;
    properties->total_constant_memory = attribute_of(device, 9);
    properties->memory_pitch = attribute_of(device, 11);
    properties->texture_alignment = attribute_of(device, 14);
    properties->memory_bus_width = attribute_of(device, 37);
    properties->l2_cache_size = attribute_of(device, 38);
    properties->can_map_host_memory = 1;
    properties->unified_addressing = 1;
    properties->managed_memory = 1;
    properties->host_register_supported = 1;
    properties->memory_pools_supported = 1;
}

int cudaGetDeviceProperties(DeviceProperties *properties, int device) {
    INITIALIZE();
    if (device < 0 || device >= num_visible)
        return failed(cudaErrorInvalidDevice);
    int on_bus = visible[device];
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "%s", settings.cards[on_bus].name);
    make_uuid(on_bus, properties->uuid);
    properties->pci_bus_id = attribute_of(on_bus, 33);
    properties->async_engine_count = attribute_of(on_bus, 40);
    properties->concurrent_kernels = 1;
    properties->stream_priorities_supported = 1;
    properties->cooperative_launch = 1;
    describe_multiprocessors(properties, on_bus);
    describe_memory(properties, on_bus);
    return cudaSuccess;
}

int cudaDeviceGetPCIBusId(char *text, int size, int device) {
    INITIALIZE();
    write_bus_id(visible[device], text, size);
    return cudaSuccess;
}

int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0;
    return cudaSuccess;
}

int cudaDriverGetVersion(int *version) {
    *version = settings.driver_version;
    return cudaSuccess;
}

int cudaRuntimeGetVersion(int *version) {
    *version = RUNTIME_VERSION;
    return cudaSuccess;
}

/* ---- errors */

typedef struct {
    int error;
    const char *name, *text;
} Words;

static const Words words[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {35, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {46, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {209, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {304, "cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {401, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {701, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {715, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"},
    {716, "cudaErrorMisalignedAddress", "misaligned address"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {999, "cudaErrorUnknown", "unknown error"},
};

static const Words *words_of(int error) {
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (words[i].error == error)
            return &words[i];
    return NULL;
}

const char *name_of_error(int error) {
    const Words *found = words_of(error);
    return found ? found->name : "unrecognized error code";
}

const char *text_of_error(int error) {
    const Words *found = words_of(error);
    return found ? found->text : "unrecognized error code";
}

const char *cudaGetErrorString(int error) {
    return text_of_error(error);
}

const char *cudaGetErrorName(int error) {
    return name_of_error(error);
}

int cudaGetLastError(void) {
    int error = last_error();
    forget_error();
    return error;
}

int cudaPeekAtLastError(void) {
    return last_error();
}

/* ---- handles of things of which nothing is known but that they are there */

int new_handle(void **handle) {
    *handle = calloc(1, 64);
    return 0;
}
