/* Kernels: registered by torch's libraries, launched, and over in a made-up time. They compute nothing; a number alone
 * in its block gets what a fill writes, and 0 from all others, so that what a loop reads back is the same each time. */
#include "played.h"

#include <stdlib.h>
#include <string.h>

enum { UNKNOWN = -1, OTHER = 0, ELEMENTWISE = 1, REDUCTION = 2, LOSS = 3 };

typedef struct {
    const void *host;
    const char *name;
    signed char fill_bytes, kind;
} Kernel;

static Kernel *kernels;
static size_t num_kernels, room;
static int is_sorted;
static _Atomic int launches_of_part;
static __thread struct {
    Dim3 grid, block;
    size_t shared;
    void *stream;
} call;

/* ---- registration, as the code does that nvcc puts into a library */

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {
}

void __cudaUnregisterFatBinary(void **handle) {
}

void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                       int constant, int global) {
}

char __cudaInitModule(void **handle) {
    return 1;
}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *thread_id,
                            void *block_id, void *block, void *grid, int *warp_size) {
    if (num_kernels == room) {
        room = room ? 2 * room : 1 << 16;
        kernels = realloc(kernels, room * sizeof *kernels);
    }
    kernels[num_kernels++] = (Kernel){host, name, UNKNOWN, UNKNOWN};
    is_sorted = 0;
}

static int compare_hosts(const void *a, const void *b) {
    const Kernel *x = a, *y = b;
    return x->host < y->host ? -1 : x->host > y->host;
}

static Kernel *kernel_of(const void *host) {
    pthread_mutex_lock(&lock);
    if (!is_sorted)
        qsort(kernels, num_kernels, sizeof *kernels, compare_hosts);
    is_sorted = 1;
    pthread_mutex_unlock(&lock);
    Kernel key = {.host = host};
    return bsearch(&key, kernels, num_kernels, sizeof *kernels, compare_hosts);
}

/* ---- what a kernel's mangled name says of what it writes */

/* Bytes of the value that a fill kernel writes; 0 for another kernel. */
static int size_of_fill(const char *name) {
    const char *functor = strstr(name, "elementwise_kernelI") ? strstr(name, "11FillFunctorI") : NULL;
    if (!functor)
        return 0;
    switch (functor[14]) {
    case 'f':
    case 'i':
        return 4;
    case 'd':
    case 'l':
        return 8;
    case 's':
        return 2;
    case 'N':
        if (strstr(functor, "complex"))
            return 0;
        return strstr(functor, "Float8") ? 1 : 2;
    default:
        return 0;
    }
}

static int kind_of_kernel(const char *name) {
    if (strstr(name, "elementwise_kernelI"))
        return strstr(name, "legacy") || strstr(name, "18elementwise_kernelI") ? OTHER : ELEMENTWISE;
    if (strstr(name, "13reduce_kernelI"))
        return REDUCTION;
    return strstr(name, "nll_loss_forward") ? LOSS : OTHER;
}

static void describe(Kernel *kernel) {
    kernel->fill_bytes = size_of_fill(kernel->name);
    kernel->kind = kind_of_kernel(kernel->name);
    note("kernel %s", kernel->name);
}

static void write_number(Kernel *kernel, void **arguments) {
    if (kernel->fill_bytes > 0) {
        if (*(int *)arguments[0] == 1)
            memcpy(*(void **)arguments[2], arguments[1], kernel->fill_bytes);
    } else if (kernel->kind == ELEMENTWISE) {
        if (*(int *)arguments[0] == 1)
            zero_number(*(void **)arguments[2]);
    } else if (kernel->kind == REDUCTION) {
        for (int i = 0; i < 256; i++) /* somewhere in its description */
            zero_number(((void **)arguments[0])[i]);
    } else if (kernel->kind == LOSS) {
        zero_number(*(void **)arguments[0]);
    }
}

/* ---- launches */

/* Whether this launch is the one that the books say fails. */
static int is_due(void) {
    int64_t left = books->launches_until_error;
    while (left > 0)
        if (atomic_compare_exchange_weak(&books->launches_until_error, &left, left - 1))
            return left == 1;
    return 0;
}

/* As late as on a card: some calls further on, and at the latest when somebody waits for the device. */
static void break_soon(int error) {
    int64_t ns = 200000;
    break_context(error, now_ns() + ns);
    work(2 * ns);
}

int count_launch(const char *name) {
    ENTER();
    own->launches++;
    if (is_due())
        break_soon(books->launch_error);
    if (settings.kernel_error && name && strstr(name, settings.kernel_error_part) &&
        ++launches_of_part == settings.kernel_error_at)
        break_soon(settings.kernel_error);
    return cudaSuccess;
}

static int launch(const void *host, Dim3 grid, Dim3 block, void **arguments) {
    Kernel *kernel = kernel_of(host);
    double threads = (double)grid.x * grid.y * grid.z * block.x * block.y * block.z;
    int error = count_launch(kernel ? kernel->name : NULL);
    if (error)
        return error;
    if (threads <= 0)
        return failed(cudaErrorInvalidConfiguration);
    if (kernel && kernel->kind == UNKNOWN)
        describe(kernel);
    if (kernel && arguments)
        write_number(kernel, arguments);
    work(settings.launch_ns + threads * settings.ns_per_thread);
    return cudaSuccess;
}

int cudaLaunchKernel(const void *host, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) {
    return launch(host, grid, block, arguments);
}

int cudaLaunchCooperativeKernel(const void *host, Dim3 grid, Dim3 block, void **arguments, size_t shared,
                                void *stream) {
    return launch(host, grid, block, arguments);
}

int __cudaLaunchKernel(const void *host, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) {
    return launch(host, grid, block, arguments);
}

int cudaLaunchKernelExC(const LaunchConfig *config, const void *host, void **arguments) {
    return launch(host, config->grid, config->block, arguments);
}

int __cudaGetKernel(const void **kernel, const void *host) {
    *kernel = host;
    return cudaSuccess;
}

unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
    call.grid = grid;
    call.block = block;
    call.shared = shared;
    call.stream = stream;
    return 0;
}

int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **stream) {
    *grid = call.grid;
    *block = call.block;
    *shared = call.shared;
    *stream = call.stream;
    return cudaSuccess;
}

/* ---- what a kernel asks for */

/* CUB wants one of the architectures that torch has kernels for. */
static int built_for(void) {
    static const int built[] = {120, 100, 90, 86, 80, 75};
    Card *card = &settings.cards[device_now()];
    int asked = 10 * card->major + card->minor;
    for (size_t i = 0; i < sizeof built / sizeof *built; i++)
        if (built[i] <= asked)
            return built[i];
    return asked;
}

int cudaFuncGetAttributes(FunctionAttributes *attributes, const void *host) {
    ENTER();
    memset(attributes, 0, sizeof *attributes);
    attributes->max_threads_per_block = 1024;
    attributes->registers = 32;
    attributes->ptx_version = attributes->binary_version = built_for();
    attributes->max_dynamic_shared_bytes = 49152;
    return cudaSuccess;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int block, size_t shared,
                                                           unsigned flags) {
    *blocks = block > 0 && block < 2048 ? 2048 / block : 1;
    return cudaSuccess;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int block, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, block, shared, 0);
}
