/* libcuda, the driver's own interface: what torch, inductor and Triton ask of it directly. */
#define _GNU_SOURCE
#include "played.h"

#include <dlfcn.h>
#include <string.h>

/* The functions that nobody has written are these two: see build.py. */
int played_ok(void) {
    return 0;
}

int played_create(void **handle) {
    return new_handle(handle);
}

int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                     int *status) {
    INITIALIZE();
    static void *self;
    Dl_info info;
    if (!self && dladdr((void *)played_ok, &info))
        self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *function = self ? dlsym(self, symbol) : NULL;
    if (!*function) {
        note("driver entry point %s is a stub", symbol);
        *function = (void *)played_ok;
    }
    if (status)
        *status = 0;
    return cudaSuccess;
}

/* ---- devices and contexts */

int cuInit(unsigned flags) {
    return initialize();
}

int cuDriverGetVersion(int *version) {
    *version = settings.driver_version;
    return cudaSuccess;
}

int cuDeviceGetCount(int *count) {
    return cudaGetDeviceCount(count);
}

int cuDeviceGet(int *device, int index) {
    INITIALIZE();
    *device = index;
    return index < num_visible ? cudaSuccess : cudaErrorInvalidDevice;
}

int cuDeviceGetName(char *name, int size, int device) {
    INITIALIZE();
    snprintf(name, size, "%s", settings.cards[visible[device]].name);
    return cudaSuccess;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    INITIALIZE();
    *bytes = settings.cards[visible[device]].total_bytes;
    return cudaSuccess;
}

static void *context_of(int device) {
    return (void *)(uintptr_t)(0x1000 + device);
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    INITIALIZE();
    *flags = 0;
    *is_active = own && own->context_bytes[visible[device]];
    return cudaSuccess;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER();
    *context = context_of(device);
    return cudaSuccess;
}

int cuCtxGetCurrent(void **context) {
    *context = own && own->context_bytes[device_now()] ? context_of(current_device) : NULL;
    return cudaSuccess;
}

int cuCtxGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

int cuCtxSynchronize(void) {
    return cudaDeviceSynchronize();
}

int cuCtxSetLimit(int limit, size_t value) {
    return cudaSuccess;
}

int cuCtxGetLimit(size_t *value, int limit) {
    *value = 1 << 20;
    return cudaSuccess;
}

int cuGetErrorString(int error, const char **text) {
    *text = text_of_error(error);
    return cudaSuccess;
}

int cuGetErrorName(int error, const char **text) {
    *text = name_of_error(error);
    return cudaSuccess;
}

/* ---- memory */

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    return cudaMemGetInfo(free_bytes, total_bytes);
}

int cuMemAlloc_v2(void **at, size_t size) {
    return cudaMalloc(at, size);
}

int cuMemFree_v2(void *at) {
    return cudaFree(at);
}

int cuPointerGetAttribute(uint64_t *value, int attribute, void *at) {
    switch (attribute) {
    case 2: /* host or device */
        *value = kind_of_memory(at) == PINNED ? 1 : 2;
        break;
    case 3: /* the pointer on the device */
    case 4: /* and on the host */
        *value = (uintptr_t)at;
        break;
    default:
        *value = 0;
    }
    return cudaSuccess;
}

/* ---- modules and launches, for kernels that inductor and Triton compiled */

int cuModuleLoadData(void **module, const void *image) {
    ENTER();
    return new_handle(module);
}

int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void *values) {
    return cuModuleLoadData(module, image);
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    return new_handle(function);
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* threads of a block, registers */
    return cudaSuccess;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int block, size_t shared) {
    *blocks = 2;
    return cudaSuccess;
}

int cuOccupancyMaxActiveClusters(int *clusters, void *function, void *config) {
    *clusters = 16;
    return cudaSuccess;
}

static int launch(const unsigned *sizes) {
    int error = count_launch("compiled");
    if (error)
        return error;
    double threads = (double)sizes[0] * sizes[1] * sizes[2] * sizes[3] * sizes[4] * sizes[5];
    work(settings.launch_ns + threads * settings.ns_per_thread);
    return cudaSuccess;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra) {
    unsigned sizes[] = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
    return launch(sizes);
}

int cuLaunchKernelEx(const unsigned *config, void *function, void **arguments, void **extra) {
    return launch(config); /* it begins with the six sizes */
}

int cuStreamSynchronize(void *stream) {
    return cudaStreamSynchronize(stream);
}
