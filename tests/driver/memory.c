/* Memory of the cards and page-locked memory of the host, and copies between them.
 *
 * Device memory is address space alone: it is booked in full and its pages stay untouched. What is read back is 0, a
 * bool true; numbers of up to 8 bytes that were filled or uploaded keep their value. */
#define _GNU_SOURCE
#include "played.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE (2 * MIB)
#define HOST_PAGE 4096

typedef struct {
    char *at;
    uint64_t size;
    int kind, device;
} Range;

typedef struct {
    uint64_t size;
    int device;
} Physical; /* memory of cuMemCreate, which expandable segments map into reserved addresses */

static Range *ranges;
static size_t num_ranges, room;
static char *lowest = (char *)-1, *highest; /* device memory lies between */
static uint64_t pinned_bytes;

static void add_range(void *at, uint64_t size, int kind, int device) {
    if (num_ranges == room) {
        room = room ? 2 * room : 256;
        ranges = realloc(ranges, room * sizeof *ranges);
    }
    if (kind >= DEVICE) {
        if ((char *)at < lowest)
            lowest = at;
        if ((char *)at + size > highest)
            highest = (char *)at + size;
    }
    ranges[num_ranges++] = (Range){at, size, kind, device};
}

static Range *range_of(const void *at) {
    for (size_t i = num_ranges; i--;)
        if ((char *)at >= ranges[i].at && (char *)at < ranges[i].at + ranges[i].size)
            return &ranges[i];
    return NULL;
}

int kind_of_memory(const void *at) {
    pthread_mutex_lock(&lock);
    Range *range = range_of(at);
    int kind = range ? range->kind : PAGEABLE;
    pthread_mutex_unlock(&lock);
    return kind;
}

static uint64_t round_up(uint64_t size, uint64_t to) {
    return (size + to - 1) / to * to;
}

uint64_t round_to_pages(uint64_t size) {
    return round_up(size, PAGE);
}

/* Address space that begins on a page of the device's. */
static void *take_addresses(uint64_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *taken = mmap(NULL, size + PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (taken == MAP_FAILED)
        return NULL;
    char *at = (char *)round_up((uintptr_t)taken, PAGE);
    if (at > taken)
        munmap(taken, at - taken);
    if (at + size < taken + size + PAGE)
        munmap(at + size, taken + PAGE - at);
    madvise(at, size, MADV_NOHUGEPAGE);
    return at;
}

/* ---- device memory */

int cudaMalloc(void **at, size_t size) {
    ENTER();
    *at = NULL;
    if (!size)
        return cudaSuccess;
    uint64_t whole = round_to_pages(size);
    int device = device_now();
    pthread_mutex_lock(&lock);
    int error = book(device, whole);
    if (!error && (*at = take_addresses(whole))) {
        add_range(*at, whole, DEVICE, device);
    } else if (!error) {
        own->held_bytes[device] -= whole;
        error = failed(cudaErrorMemoryAllocation);
    }
    pthread_mutex_unlock(&lock);
    note("cudaMalloc %zu -> %d", size, error);
    return error;
}

static int give_back(void *at, int kind) {
    if (!at)
        return cudaSuccess;
    int error = cudaSuccess;
    pthread_mutex_lock(&lock);
    Range *range = range_of(at);
    if (range && range->at == at && range->kind == kind) {
        if (kind == DEVICE)
            own->held_bytes[range->device] -= range->size;
        if (kind == PINNED)
            pinned_bytes -= range->size;
        munmap(range->at, range->size);
        *range = ranges[--num_ranges];
    } else {
        error = failed(cudaErrorInvalidValue);
    }
    pthread_mutex_unlock(&lock);
    return error;
}

int cudaFree(void *at) {
    ENTER();
    if (at)
        wait_for_device(device_now());
    return give_back(at, DEVICE);
}

int cudaMallocAsync(void **at, size_t size, void *stream) {
    return cudaMalloc(at, size);
}

int cudaFreeAsync(void *at, void *stream) {
    ENTER();
    return give_back(at, DEVICE);
}

int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    ENTER();
    int device = device_now();
    pthread_mutex_lock(&lock);
    *total_bytes = settings.cards[device].total_bytes;
    *free_bytes = *total_bytes - used_bytes(device);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

int cudaPointerGetAttributes(PointerAttributes *attributes, const void *at) {
    INITIALIZE();
    memset(attributes, 0, sizeof *attributes);
    attributes->device = -2;
    pthread_mutex_lock(&lock);
    Range *range = range_of(at);
    if (range) {
        attributes->type = range->kind == PINNED ? 1 : 2;
        attributes->device = 0;
        attributes->device_pointer = (void *)at;
        for (int i = 0; i < num_visible; i++)
            if (visible[i] == range->device)
                attributes->device = i;
        if (range->kind == PINNED)
            attributes->host_pointer = (void *)at;
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

int cudaDeviceGetDefaultMemPool(void **pool, int device) {
    static int only;
    *pool = &only;
    return cudaSuccess;
}

int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
    *(uint64_t *)value = 0;
    return cudaSuccess;
}

/* ---- page-locked memory of the host */

static int may_pin(uint64_t size) {
    uint64_t limit = books->pinnable_bytes;
    return !limit || pinned_bytes + size <= limit;
}

static int add_pinned(void *at, uint64_t size) {
    pthread_mutex_lock(&lock);
    int may = may_pin(size);
    if (may) {
        pinned_bytes += size;
        add_range(at, size, PINNED, 0);
    }
    pthread_mutex_unlock(&lock);
    return may ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

int cudaHostAlloc(void **at, size_t size, unsigned flags) {
    ENTER();
    uint64_t whole = size ? round_up(size, HOST_PAGE) : HOST_PAGE;
    *at = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*at == MAP_FAILED) {
        *at = NULL;
        return failed(cudaErrorMemoryAllocation);
    }
    int error = add_pinned(*at, whole);
    if (error) {
        munmap(*at, whole);
        *at = NULL;
    }
    return error;
}

int cudaFreeHost(void *at) {
    return give_back(at, PINNED);
}

int cudaHostRegister(void *at, size_t size, unsigned flags) {
    ENTER();
    return add_pinned(at, size);
}

int cudaHostUnregister(void *at) {
    pthread_mutex_lock(&lock);
    Range *range = range_of(at);
    if (range) {
        pinned_bytes -= range->size;
        *range = ranges[--num_ranges];
    }
    pthread_mutex_unlock(&lock);
    return range ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

/* ---- expandable segments: addresses and memory apart */

int cuMemAddressReserve(void **at, size_t size, size_t alignment, void *wanted, unsigned long long flags) {
    ENTER();
    uint64_t whole = round_to_pages(size);
    void *found = take_addresses(whole);
    if (!found)
        return cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    add_range(found, whole, RESERVED, device_now());
    pthread_mutex_unlock(&lock);
    *at = found;
    return cudaSuccess;
}

int cuMemAddressFree(void *at, size_t size) {
    return give_back(at, RESERVED);
}

/* properties: type, types of handles, type of location, device, ... */
int cuMemCreate(Physical **handle, size_t size, const int *properties, unsigned long long flags) {
    ENTER();
    int device = visible[properties[3]];
    uint64_t whole = round_to_pages(size);
    pthread_mutex_lock(&lock);
    int error = book(device, whole);
    pthread_mutex_unlock(&lock);
    forget_error(); /* the runtime knows nothing of calls below it */
    note("cuMemCreate %zu -> %d", size, error);
    if (error)
        return error;
    *handle = malloc(sizeof **handle);
    **handle = (Physical){whole, device};
    return cudaSuccess;
}

int cuMemRelease(Physical *handle) {
    pthread_mutex_lock(&lock);
    if (own) /* not in a child that was forked */
        own->held_bytes[handle->device] -= handle->size;
    pthread_mutex_unlock(&lock);
    free(handle);
    return cudaSuccess;
}

int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    *bytes = PAGE;
    return cudaSuccess;
}

/* ---- copies */

static void move(void *to, const void *from, size_t size, int is_in, int is_out) {
    int is_a_bool_read = is_out && !is_in && size == 1;
    if ((!is_in && !is_out) || (!is_a_bool_read && (size <= 8 || size <= settings.readable_bytes)))
        memmove(to, from, size);
    else if (is_out && !is_in)
        memset(to, size == 1, size); /* a bool is true, so that what is checked for all values passes */
}

static double copy_bytes_s(int to_kind, int from_kind) {
    if (to_kind >= DEVICE && from_kind >= DEVICE)
        return settings.cards[device_now()].bytes_s / 2;
    int host_kind = to_kind >= DEVICE ? from_kind : to_kind;
    return host_kind == PINNED ? settings.link_bytes_s : settings.link_bytes_s / 2;
}

static int copy(void *to, const void *from, size_t size, int waits) {
    ENTER();
    if (!size)
        return cudaSuccess;
    int to_kind = kind_of_memory(to), from_kind = kind_of_memory(from);
    int is_in = to_kind >= DEVICE, is_out = from_kind >= DEVICE;
    int is_read_at_once = is_out && to_kind == PAGEABLE;
    if (is_out && size <= 65536)
        wait_for_data(from, size);
    if (is_read_at_once)
        wait_for_device(device_now());
    ENTER(); /* a kernel before it may have failed */
    work(settings.launch_ns + size * 1e9 / copy_bytes_s(to_kind, from_kind));
    move(to, from, size, is_in, is_out);
    if (waits || is_read_at_once)
        wait_for_device(device_now());
    return cudaSuccess;
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    return copy(to, from, size, 1);
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    return copy(to, from, size, 0);
}

int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, void *stream) {
    return copy(to, from, size, 0);
}

int cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height,
                      int kind, void *stream) {
    for (size_t i = 0; i < height; i++) {
        int error = copy(to + i * to_pitch, from + i * from_pitch, width, 0);
        if (error)
            return error;
    }
    return cudaSuccess;
}

int cudaMemset(void *at, int value, size_t size) {
    ENTER();
    work(settings.launch_ns + size * 1e9 / settings.cards[device_now()].bytes_s);
    if (size <= 8)
        memset(at, value, size);
    return cudaSuccess;
}

int cudaMemsetAsync(void *at, int value, size_t size, void *stream) {
    return cudaMemset(at, value, size);
}

int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind) {
    return cudaSuccess;
}

int cudaGetSymbolAddress(void **at, const void *symbol) {
    static char zeros[1 << 16];
    *at = zeros;
    return cudaSuccess;
}

void zero_number(void *at) {
    if ((uintptr_t)at & 1 || (char *)at < lowest || (char *)at >= highest)
        return;
    if (kind_of_memory(at) >= DEVICE)
        memset(at, 0, 8);
}
