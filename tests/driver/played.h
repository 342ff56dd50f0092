/* What the files of the played driver share. The types of CUDA that torch hands over are written out by hand here, so
 * that no header of NVIDIA's is needed; everything declared below is invisible outside of libplayed.so. */
#ifndef PLAYED_H
#define PLAYED_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define MAX_DEVICES 8
#define MAX_PROCESSES 256
#define MIB (1ull << 20)
#define RUNTIME_VERSION 13000

/* ---- CUDA's own types, as torch's libraries were compiled with them (CUDA 13) */

typedef struct {
    unsigned x, y, z;
} Dim3;

typedef struct {
    char name[256];
    unsigned char uuid[16];
    char luid[8];
    unsigned luid_device_node_mask;
    size_t total_global_memory;
    size_t shared_memory_per_block;
    int registers_per_block;
    int warp_size;
    size_t memory_pitch;
    int max_threads_per_block;
    int max_threads_dim[3];
    int max_grid_size[3];
    size_t total_constant_memory;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
    int multiprocessor_count;
    int integrated;
    int can_map_host_memory;
    int textures_and_surfaces[39];
    size_t surface_alignment;
    int concurrent_kernels;
    int ecc_enabled;
    int pci_bus_id, pci_device_id, pci_domain_id;
    int tcc_driver;
    int async_engine_count;
    int unified_addressing;
    int memory_bus_width;
    int l2_cache_size;
    int persisting_l2_cache_max_size;
    int max_threads_per_multiprocessor;
    int stream_priorities_supported;
    int global_l1_cache_supported, local_l1_cache_supported;
    size_t shared_memory_per_multiprocessor;
    int registers_per_multiprocessor;
    int managed_memory;
    int is_multi_gpu_board, multi_gpu_board_group_id;
    int host_native_atomic_supported;
    int pageable_memory_access;
    int concurrent_managed_access;
    int compute_preemption_supported;
    int can_use_host_pointer_for_registered_memory;
    int cooperative_launch;
    size_t shared_memory_per_block_optin;
    int pageable_memory_access_uses_host_page_tables;
    int direct_managed_memory_access_from_host;
    int max_blocks_per_multiprocessor;
    int access_policy_max_window_size;
    size_t reserved_shared_memory_per_block;
    int host_register_supported;
    int sparse_array_supported;
    int host_register_read_only_supported;
    int timeline_semaphore_interop_supported;
    int memory_pools_supported;
    int other[71];
} DeviceProperties;

_Static_assert(sizeof(DeviceProperties) == 1008, "cudaDeviceProp of CUDA 13 has 1008 bytes");
_Static_assert(offsetof(DeviceProperties, multiprocessor_count) == 384, "cudaDeviceProp.multiProcessorCount");
_Static_assert(offsetof(DeviceProperties, pci_bus_id) == 568, "cudaDeviceProp.pciBusID");
_Static_assert(offsetof(DeviceProperties, shared_memory_per_multiprocessor) == 624, "sharedMemPerMultiprocessor");
_Static_assert(offsetof(DeviceProperties, shared_memory_per_block_optin) == 672, "sharedMemPerBlockOptin");
_Static_assert(offsetof(DeviceProperties, memory_pools_supported) == 720, "cudaDeviceProp.memoryPoolsSupported");

typedef struct {
    int type; /* 0 unregistered, 1 host, 2 device */
    int device;
    void *device_pointer, *host_pointer;
    long reserved[8];
} PointerAttributes;

_Static_assert(sizeof(PointerAttributes) == 88, "cudaPointerAttributes of CUDA 13 has 88 bytes");

typedef struct {
    size_t shared_bytes, constant_bytes, local_bytes;
    int max_threads_per_block;
    int registers;
    int ptx_version, binary_version;
    int cache_mode;
    int max_dynamic_shared_bytes;
    int other[24];
} FunctionAttributes;

_Static_assert(sizeof(FunctionAttributes) == 144, "cudaFuncAttributes of CUDA 13 has 144 bytes");
_Static_assert(offsetof(FunctionAttributes, max_dynamic_shared_bytes) == 44, "maxDynamicSharedSizeBytes");

typedef struct {
    Dim3 grid, block; /* and shared memory, stream and attributes, which nothing here reads */
} LaunchConfig;

enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = 35,
    cudaErrorDevicesUnavailable = 46,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorIllegalState = 401,
    cudaErrorNotReady = 600,
    cudaErrorHostMemoryNotRegistered = 713,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorUnknown = 999,
};

#pragma GCC visibility push(hidden)

/* ---- settings.c: what holds for a process's whole life */

typedef struct {
    char name[96];
    int major, minor, num_multiprocessors;
    uint64_t total_bytes, board_bytes; /* board_bytes: of the whole card, where this is a slice of it */
    uint64_t neighbour_bytes, l2_bytes; /* neighbour_bytes: what others hold from the beginning */
    uint64_t context_bytes, library_bytes; /* library_bytes: what cuBLAS and cuDNN add to a context, each */
    double fp32_flops, tf32_flops, bf16_flops, bytes_s;
    double idle_w, kernel_w, fp32_w, tf32_w, bf16_w; /* drawn by nothing, by a kernel, by a product of a type */
    unsigned power_limit_mw, sm_clock_mhz, memory_clock_mhz;
} Card;

typedef struct {
    int num_devices;
    Card cards[MAX_DEVICES]; /* in the order of the bus */
    int driver_version;
    int nvml_error; /* what nvmlInit returns */
    int mig; /* the cards are slices of boards that are divided */
    uint64_t workspace_bytes; /* of a plan of cuDNN */
    uint64_t readable_bytes; /* copies up to this size move what they should */
    double launch_ns, ns_per_thread, link_bytes_s;
    int kernel_error; /* what launch number kernel_error_at of a kernel with kernel_error_part in its name ends in */
    int kernel_error_at;
    char kernel_error_part[64];
    uint64_t nccl_bytes; /* of a communicator, beside the allocator */
    double nccl_bytes_s, nccl_init_s;
    int nccl_notices_death, nccl_shares_device;
    char state[256]; /* the file of the books; empty: books of this process alone */
    FILE *log;
} Settings;

extern Settings settings;
void read_settings(void);
void note(const char *format, ...) __attribute__((format(printf, 1, 2))); /* into the log, where one is kept */

/* ---- books.c: what all processes share, in a file that tests.driver.played reads and writes too */

#define BOOKS_VERSION 2

typedef struct {
    _Atomic int32_t pid; /* 0: free; -1: being taken */
    _Atomic uint32_t launches;
    uint64_t started; /* of the process, in the kernel's ticks: process numbers come again */
    _Atomic int64_t died_ns; /* when it was first seen dead while memory lingers */
    _Atomic uint64_t busy_ns;
    _Atomic uint64_t held_bytes[MAX_DEVICES], context_bytes[MAX_DEVICES];
} Process;

typedef struct { /* zero everywhere means: as the settings have it */
    _Atomic uint64_t neighbour_bytes;
    _Atomic uint64_t throttle_reasons; /* bits of NVML */
    _Atomic uint64_t energy_mj;
    _Atomic uint64_t work_nj; /* used by work of all processes, beside what an idle card uses */
    _Atomic int64_t energy_read_ns; /* energy_mj is what had been used then */
    _Atomic uint32_t power_mw, temperature_c;
    _Atomic uint32_t utilization, memory_utilization; /* percent and 1 */
    _Atomic uint32_t error; /* the card is off the bus; what CUDA says then */
    _Atomic uint32_t is_neighbour_known; /* neighbour_bytes was set, by a test or from the settings */
} CardState;

typedef struct {
    _Atomic uint32_t version, size;
    _Atomic int64_t linger_ns; /* how long a dead process's memory stays held */
    _Atomic uint64_t pinnable_bytes; /* 0: without limit */
    _Atomic int64_t launches_until_error; /* of any process; 0: no error */
    _Atomic uint32_t launch_error; /* what that launch ends in */
    _Atomic uint32_t without_cudnn_plan;
    CardState cards[MAX_DEVICES];
    Process processes[MAX_PROCESSES];
} Books;

extern Books *books;
extern Process *own; /* this process's entry, once it has a context */
extern pthread_mutex_t lock;
extern __thread int current_device; /* as CUDA numbers those that are visible */
extern int visible[MAX_DEVICES], num_visible;

int failed(int error); /* keeps it for cudaGetLastError */
void forget_error(void);
int last_error(void);
int initialize(void); /* as cuInit */
int enter(void); /* as every call does that needs a context: 0, or why it fails */
int device_now(void); /* in the order of the bus */
int load_library(void); /* books the kernels of cuBLAS or cuDNN; whether that failed */
void break_context(int error, int64_t at_ns);
uint64_t used_bytes(int device);
int book(int device, uint64_t size); /* with the lock held */
int is_alive(Process *process);
int is_dead(int pid);
void make_uuid(int device, unsigned char *bytes);
void write_uuid(int device, char *text, size_t size);
void write_board_uuid(int device, char *text, size_t size); /* of the board that a slice is of */
void write_bus_id(int device, char *text, size_t size);
uint64_t energy_mj(int device);
void draw(int device, double nj); /* what work uses, beside what an idle card uses */
unsigned power_mw(int device);

/* ---- timeline.c: streams, events, graphs, collectives that wait for each other */

typedef struct Communicator Communicator;

int64_t now_ns(void);
void sleep_us(int us);
void work(double ns); /* a kernel takes that long on the device */
void work_at(double ns, double watts);
void settle(int device);
void wait_for_device(int device);
void wait_for_data(const char *from, uint64_t size);
int is_capturing(void);
void enqueue_collective(Communicator *communicator, uint64_t number, int64_t ns, char *to, uint64_t size);
int64_t began_everywhere_ns(Communicator *communicator, uint64_t number, char *to); /* nccl.c; 0: not yet */

/* ---- memory.c */

enum { PAGEABLE = 0, PINNED = 1, DEVICE = 2, RESERVED = 3 };

int kind_of_memory(const void *at);
uint64_t round_to_pages(uint64_t size);
void zero_number(void *at); /* where a kernel leaves one */

/* ---- kernels.c */

int count_launch(const char *name); /* and break the context where the settings or the books say so */

/* ---- cudart.c, which libcuda.c and nccl.c call */

const char *name_of_error(int error);
const char *text_of_error(int error);
int new_handle(void **handle);

#pragma GCC visibility pop

int cudaMalloc(void **at, size_t size);
int cudaFree(void *at);
int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
int cudaGetDeviceCount(int *count);
int cudaDeviceGetAttribute(int *value, int attribute, int device);
int cudaDeviceSynchronize(void);
int cudaStreamSynchronize(void *stream);

#define ENTER()                  \
    do {                         \
        int error_ = enter();    \
        if (error_)              \
            return error_;       \
    } while (0)

#define INITIALIZE()                \
    do {                            \
        int error_ = initialize();  \
        if (error_)                 \
            return error_;          \
    } while (0)

#endif
