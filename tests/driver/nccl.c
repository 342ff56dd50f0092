/* NCCL: ranks meet in a file named after the unique id. A collective is over when all ranks have begun it, which events
 * and synchronization wait for; it moves no bytes but those of small blocks. A communicator takes device memory. */
#define _GNU_SOURCE
#include "played.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RING 256 /* collectives that a rank may be ahead of another */
#define MAX_RANKS 16
#define SMALL_BYTES 65536

enum {
    UNHANDLED_CUDA_ERROR = 1,
    SYSTEM_ERROR = 2,
    INTERNAL_ERROR = 3,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
};
enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, POINT_TO_POINT };
enum { SUM = 0, PRODUCT = 1, MAXIMUM = 2, MINIMUM = 3, AVERAGE = 4 };

static const char *names[] = {"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AlltoAll", "P2P"};

typedef union {
    char bytes[128];
    uint64_t words[16];
} Id;

typedef struct {
    int kind, type, reduction, root;
    uint64_t count;
    uint64_t in_bytes, out_bytes; /* of one rank's blocks */
    uint64_t moved_bytes;         /* over the links */
} Request;

typedef struct {
    _Atomic uint64_t number;
    int64_t began_ns;
    Request request;
    uint64_t data_bytes; /* 0: too large to be moved */
    char data[SMALL_BYTES];
} Slot;

typedef struct {
    _Atomic int num_joined, is_aborted;
    int devices[MAX_RANKS], pids[MAX_RANKS], colors[RING][MAX_RANKS], keys[RING][MAX_RANKS];
    _Atomic uint64_t num_splits[MAX_RANKS], done[MAX_RANKS];
    Slot slots[];
} Meeting;

struct Communicator {
    int rank, num_ranks, device, is_released, has_reported;
    uint64_t bytes, issued, num_splits;
    _Atomic int is_aborted;
    Meeting *meeting; /* NULL: one process holds all ranks */
    Id id;
};

static __thread char last_text[256];

static int fail(int error, const char *text) {
    snprintf(last_text, sizeof last_text, "%s", text);
    note("nccl: %s", text);
    return error;
}

static Slot *slot_of(Communicator *communicator, int rank, uint64_t number) {
    return &communicator->meeting->slots[(size_t)rank * RING + number % RING];
}

static unsigned long long hash_of(const Id *id) {
    unsigned long long hash = 1469598103934665603ull;
    for (size_t i = 0; i < sizeof id->bytes; i++)
        hash = (hash ^ (unsigned char)id->bytes[i]) * 1099511628211ull;
    return hash;
}

int ncclGetVersion(int *version) {
    *version = 22907;
    return 0;
}

const char *ncclGetErrorString(int error) {
    static const char *texts[] = {
        "no error",
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "internal error - please report this issue to the NCCL developers",
        "invalid argument (run with NCCL_DEBUG=WARN for details)",
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "remote process exited or there was a network error",
        "NCCL operation in progress",
    };
    return error >= 0 && error < 8 ? texts[error] : "unknown result code";
}

const char *ncclGetLastError(Communicator *communicator) {
    return last_text;
}

int ncclGetUniqueId(Id *id) {
    memset(id, 0, sizeof *id);
    int file = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (file < 0 || read(file, id->bytes, 16) != 16)
        return SYSTEM_ERROR;
    close(file);
    return 0;
}

/* ---- communicators */

static void release(Communicator *communicator) {
    if (communicator->is_released)
        return;
    communicator->is_released = 1;
    if (!own)
        return;
    pthread_mutex_lock(&lock);
    own->held_bytes[communicator->device] -= communicator->bytes;
    pthread_mutex_unlock(&lock);
}

static Meeting *open_meeting(const char *path, int num_ranks) {
    size_t size = sizeof(Meeting) + sizeof(Slot) * RING * num_ranks;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0 || ftruncate(file, size))
        return NULL;
    Meeting *meeting = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    return meeting == MAP_FAILED ? NULL : meeting;
}

/* Waits for the other ranks; whether all came. */
static int wait_for_ranks(Meeting *meeting, int num_ranks) {
    int64_t until = now_ns() + (int64_t)(settings.nccl_init_s * 1e9);
    while (meeting->num_joined < num_ranks && !meeting->is_aborted && now_ns() < until)
        sleep_us(200);
    return meeting->num_joined >= num_ranks;
}

/* A rank on the same card, or -1. */
static int rank_on_same_device(Communicator *communicator) {
    Meeting *meeting = communicator->meeting;
    for (int i = 0; i < communicator->num_ranks && !settings.nccl_shares_device; i++)
        if (i != communicator->rank && meeting->devices[i] == communicator->device)
            return i;
    return -1;
}

static Communicator *new_communicator(int num_ranks, const Id *id, int rank) {
    Communicator *communicator = calloc(1, sizeof *communicator);
    communicator->rank = rank;
    communicator->num_ranks = num_ranks;
    communicator->device = device_now();
    communicator->id = *id;
    communicator->bytes = round_to_pages(settings.nccl_bytes);
    return communicator;
}

/* With its memory booked. */
static int meet(Communicator *communicator, const char *path) {
    Meeting *meeting = communicator->meeting;
    meeting->num_joined++;
    int is_complete = wait_for_ranks(meeting, communicator->num_ranks);
    unlink(path);
    if (!is_complete && meeting->is_aborted)
        return fail(REMOTE_ERROR, "played NCCL: a peer failed in its init");
    if (!is_complete)
        return fail(SYSTEM_ERROR, "played NCCL: bootstrap timed out");
    int same = rank_on_same_device(communicator);
    if (same < 0)
        return 0;
    char text[160];
    snprintf(text, sizeof text, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000",
             communicator->rank, same, (communicator->device + 1) << 4);
    return fail(INVALID_USAGE, text);
}

static int out_of_memory(void) {
    return fail(UNHANDLED_CUDA_ERROR, "Cuda failure 2 'out of memory'");
}

static int join(Communicator **to, int num_ranks, const Id *id, int rank) {
    char path[320];
    *to = NULL;
    if (num_ranks > MAX_RANKS)
        return fail(INVALID_ARGUMENT, "played NCCL: too many ranks");
    int error = enter();
    if (error == cudaErrorMemoryAllocation)
        return out_of_memory();
    if (error)
        return fail(UNHANDLED_CUDA_ERROR, text_of_error(error));
    Communicator *communicator = new_communicator(num_ranks, id, rank);
    snprintf(path, sizeof path, "%s.nccl.%016llx", *settings.state ? settings.state : "/dev/shm/played", hash_of(id));
    communicator->meeting = open_meeting(path, num_ranks);
    if (!communicator->meeting)
        return fail(SYSTEM_ERROR, "played NCCL: no shared memory");
    communicator->meeting->devices[rank] = communicator->device;
    communicator->meeting->pids[rank] = getpid();
    pthread_mutex_lock(&lock);
    int is_full = book(communicator->device, communicator->bytes);
    pthread_mutex_unlock(&lock);
    forget_error();
    if (is_full) {
        communicator->meeting->is_aborted = 1;
        return out_of_memory();
    }
    error = meet(communicator, path);
    note("communicator %016llx rank %d of %d on %d: %d", hash_of(id), rank, num_ranks, communicator->device, error);
    if (error)
        release(communicator);
    else
        *to = communicator;
    return error;
}

int ncclCommInitRankConfig(Communicator **to, int num_ranks, Id id, int rank, void *config) {
    return join(to, num_ranks, &id, rank);
}

int ncclCommInitRank(Communicator **to, int num_ranks, Id id, int rank) {
    return join(to, num_ranks, &id, rank);
}

int ncclCommInitRankScalable(Communicator **to, int num_ranks, int rank, int num_ids, Id *id, void *config) {
    return join(to, num_ranks, id, rank);
}

/* One process for all ranks: there is nobody to wait for. */
int ncclCommInitAll(Communicator **to, int num_ranks, const int *devices) {
    int before = current_device, error = 0;
    for (int i = 0; i < num_ranks && !error; i++) {
        Id id;
        current_device = devices ? devices[i] : i;
        ncclGetUniqueId(&id);
        error = join(&to[i], 1, &id, 0);
        if (error)
            break;
        to[i]->rank = i;
        to[i]->num_ranks = num_ranks;
        to[i]->meeting = NULL;
    }
    current_device = before;
    return error;
}

int ncclCommSplit(Communicator *communicator, int color, int key, Communicator **to, void *config) {
    Meeting *meeting = communicator->meeting;
    uint64_t number = communicator->num_splits++;
    int *colors = meeting->colors[number % RING], *keys = meeting->keys[number % RING];
    int num_ranks = 0, rank = 0;
    *to = NULL;
    colors[communicator->rank] = color;
    keys[communicator->rank] = key;
    meeting->num_splits[communicator->rank] = number + 1;
    for (int i = 0; i < communicator->num_ranks; i++)
        while (meeting->num_splits[i] <= number) {
            if (communicator->is_aborted)
                return INTERNAL_ERROR;
            sleep_us(200);
        }
    if (color < 0)
        return 0;
    for (int i = 0; i < communicator->num_ranks; i++) {
        if (colors[i] != color)
            continue;
        num_ranks++;
        rank += keys[i] < key || (keys[i] == key && i < communicator->rank);
    }
    Id id = communicator->id;
    id.words[4] ^= (number + 1) * 0x9e3779b97f4a7c15ull;
    id.words[6] ^= color + 1;
    return join(to, num_ranks, &id, rank);
}

int ncclCommShrink(Communicator *communicator, int *excluded, int count, Communicator **to, void *config, int flags) {
    int rank = communicator->rank;
    Id id = communicator->id;
    id.words[8] += count;
    for (int i = 0; i < count; i++) {
        rank -= excluded[i] < communicator->rank;
        id.bytes[80 + excluded[i]] ^= 1;
    }
    return join(to, communicator->num_ranks - count, &id, rank);
}

int ncclCommFinalize(Communicator *communicator) {
    return 0;
}

int ncclCommAbort(Communicator *communicator) {
    communicator->is_aborted = 1;
    settle(communicator->device);
    release(communicator);
    return 0; /* it is small and may stand in a line: not freed */
}

int ncclCommDestroy(Communicator *communicator) {
    settle(communicator->device);
    return ncclCommAbort(communicator);
}

int ncclCommGetAsyncError(Communicator *communicator, int *error) {
    *error = 0;
    if (!communicator->meeting || !settings.nccl_notices_death)
        return 0;
    for (int i = 0; i < communicator->num_ranks; i++)
        if (is_dead(communicator->meeting->pids[i]))
            *error = REMOTE_ERROR;
    return 0;
}

int ncclCommCount(Communicator *communicator, int *count) {
    *count = communicator->num_ranks;
    return 0;
}

int ncclCommUserRank(Communicator *communicator, int *rank) {
    *rank = communicator->rank;
    return 0;
}

int ncclCommCuDevice(Communicator *communicator, int *device) {
    *device = communicator->device;
    return 0;
}

int ncclCommMemStats(Communicator *communicator, int statistic, uint64_t *value) {
    *value = communicator->bytes;
    return 0;
}

int ncclMemAlloc(void **at, size_t size) {
    return cudaMalloc(at, size) ? out_of_memory() : 0;
}

int ncclMemFree(void *at) {
    return cudaFree(at) ? UNHANDLED_CUDA_ERROR : 0;
}

int ncclRedOpCreatePreMulSum(int *reduction, void *scalar, int type, int where, Communicator *communicator) {
    *reduction = 5;
    return 0;
}

int ncclCommRegister(Communicator *communicator, void *at, size_t size, void **handle) {
    *handle = at;
    return 0;
}

int ncclCommWindowRegister(Communicator *communicator, void *at, size_t size, void **handle, int flags) {
    *handle = at;
    return 0;
}

/* ---- what a small collective leaves with a rank */

static int size_of_type(int type) {
    static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < 12 ? sizes[type] : 1;
}

#define REDUCE_AS(name, Type)                                                             \
    static void name(Type *to, const Type *from, uint64_t count, int reduction) {         \
        for (uint64_t i = 0; i < count; i++) {                                            \
            Type x = to[i], y = from[i];                                                  \
            if (reduction == PRODUCT)                                                     \
                to[i] = x * y;                                                            \
            else if (reduction == MAXIMUM)                                                \
                to[i] = x > y ? x : y;                                                    \
            else if (reduction == MINIMUM)                                                \
                to[i] = x < y ? x : y;                                                    \
            else                                                                          \
                to[i] = x + y;                                                            \
        }                                                                                 \
    }

REDUCE_AS(reduce_int8, signed char)
REDUCE_AS(reduce_uint8, unsigned char)
REDUCE_AS(reduce_int32, int)
REDUCE_AS(reduce_uint32, unsigned)
REDUCE_AS(reduce_int64, int64_t)
REDUCE_AS(reduce_uint64, uint64_t)
REDUCE_AS(reduce_float, float)
REDUCE_AS(reduce_double, double)

/* Half precision is left as it is. */
static void reduce_into(void *to, const void *from, uint64_t count, int type, int reduction) {
    switch (type) {
    case 0:
        return reduce_int8(to, from, count, reduction);
    case 1:
        return reduce_uint8(to, from, count, reduction);
    case 2:
        return reduce_int32(to, from, count, reduction);
    case 3:
        return reduce_uint32(to, from, count, reduction);
    case 4:
        return reduce_int64(to, from, count, reduction);
    case 5:
        return reduce_uint64(to, from, count, reduction);
    case 7:
        return reduce_float(to, from, count, reduction);
    case 8:
        return reduce_double(to, from, count, reduction);
    }
}

static void divide(void *at, uint64_t count, int type, int by) {
    for (uint64_t i = 0; i < count && type == 7; i++)
        ((float *)at)[i] /= by;
    for (uint64_t i = 0; i < count && type == 8; i++)
        ((double *)at)[i] /= by;
}

static void reduce_all(Communicator *communicator, const Slot *mine, char *to) {
    const Request *request = &mine->request;
    uint64_t offset = request->kind == REDUCE_SCATTER ? communicator->rank * request->out_bytes : 0;
    uint64_t count = request->out_bytes / size_of_type(request->type);
    memcpy(to, slot_of(communicator, 0, mine->number)->data + offset, request->out_bytes);
    for (int i = 1; i < communicator->num_ranks; i++) {
        const char *from = slot_of(communicator, i, mine->number)->data + offset;
        reduce_into(to, from, count, request->type, request->reduction);
    }
    if (request->reduction == AVERAGE)
        divide(to, count, request->type, communicator->num_ranks);
}

static void deliver(Communicator *communicator, const Slot *mine, char *to) {
    const Request *request = &mine->request;
    uint64_t size = request->in_bytes, part = size / communicator->num_ranks;
    if (!mine->data_bytes || !to)
        return;
    switch (request->kind) {
    case BROADCAST:
        memcpy(to, slot_of(communicator, request->root, mine->number)->data, size);
        return;
    case ALL_GATHER:
        for (int i = 0; i < communicator->num_ranks; i++)
            memcpy(to + i * size, slot_of(communicator, i, mine->number)->data, size);
        return;
    case ALL_TO_ALL:
        for (int i = 0; i < communicator->num_ranks; i++)
            memcpy(to + i * part, slot_of(communicator, i, mine->number)->data + communicator->rank * part, part);
        return;
    case REDUCE:
        if (communicator->rank != request->root)
            return;
    }
    reduce_all(communicator, mine, to);
}

static int agree(const Request *a, const Request *b) {
    return a->kind == b->kind && a->count == b->count && a->type == b->type;
}

static void report_mismatch(Communicator *communicator, const Slot *mine, int rank, const Slot *other) {
    if (communicator->has_reported)
        return;
    communicator->has_reported = 1;
    fprintf(stderr, "played NCCL: collective %llu never ends: rank %d asks for %s of %llu, rank %d for %s of %llu\n",
            (unsigned long long)mine->number, communicator->rank, names[mine->request.kind],
            (unsigned long long)mine->request.count, rank, names[other->request.kind],
            (unsigned long long)other->request.count);
}

int64_t began_everywhere_ns(Communicator *communicator, uint64_t number, char *to) {
    if (communicator->is_aborted)
        return now_ns();
    Slot *mine = slot_of(communicator, communicator->rank, number);
    int64_t latest = 0;
    for (int i = 0; i < communicator->num_ranks; i++) {
        Slot *slot = slot_of(communicator, i, number);
        if (slot->number != number)
            return 0;
        if (!agree(&slot->request, &mine->request)) {
            report_mismatch(communicator, mine, i, slot);
            return 0;
        }
        if (slot->began_ns > latest)
            latest = slot->began_ns;
    }
    deliver(communicator, mine, to);
    communicator->meeting->done[communicator->rank] = number;
    return latest;
}

/* ---- collectives */

/* Before its slot is written again, every rank must be through with it. */
static void wait_for_slot(Communicator *communicator, uint64_t number) {
    for (int i = 0; i < communicator->num_ranks; i++)
        while (number > communicator->meeting->done[i] + RING - 1 && !communicator->is_aborted) {
            settle(device_now());
            sleep_us(100);
        }
}

static void announce(Communicator *communicator, uint64_t number, const Request *request, const void *from) {
    Slot *slot = slot_of(communicator, communicator->rank, number);
    slot->data_bytes = from && request->in_bytes <= SMALL_BYTES ? request->in_bytes : 0;
    if (slot->data_bytes)
        memcpy(slot->data, from, request->in_bytes);
    slot->request = *request;
    slot->began_ns = now_ns();
    slot->number = number; /* last: the others wait for it */
}

/* One rank, or ranks in one process, or within a graph: nobody to wait for. */
static int run_alone(const Request *request, const void *from, void *to, int num_ranks, double ns) {
    int is_copied = request->kind != POINT_TO_POINT && num_ranks == 1 && request->in_bytes <= SMALL_BYTES;
    if (is_copied && from && to && from != to)
        memmove(to, from, request->in_bytes);
    work(ns);
    return 0;
}

static int run(Communicator *communicator, Request request, const void *from, void *to) {
    int error = count_launch("nccl");
    if (error)
        return fail(UNHANDLED_CUDA_ERROR, text_of_error(error));
    double ns = 10000 + request.moved_bytes * 1e9 / settings.nccl_bytes_s;
    if (is_capturing() || !communicator->meeting || communicator->num_ranks == 1 || request.kind == POINT_TO_POINT)
        return run_alone(&request, from, to, communicator->num_ranks, ns);
    if (communicator->is_aborted)
        return fail(INTERNAL_ERROR, "played NCCL: communicator was aborted");
    uint64_t number = ++communicator->issued;
    wait_for_slot(communicator, number);
    announce(communicator, number, &request, from);
    int is_small = slot_of(communicator, communicator->rank, number)->data_bytes > 0;
    enqueue_collective(communicator, number, (int64_t)ns, to, is_small ? request.out_bytes : 0);
    return 0;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int reduction, Communicator *communicator,
                  void *stream) {
    uint64_t bytes = count * size_of_type(type);
    Request request = {ALL_REDUCE, type, reduction, 0, count, bytes, bytes, 2 * bytes};
    return run(communicator, request, from, to);
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *communicator,
                  void *stream) {
    uint64_t bytes = count * size_of_type(type);
    Request request = {BROADCAST, type, SUM, root, count, bytes, bytes, bytes};
    return run(communicator, request, from, to);
}

int ncclBcast(void *at, size_t count, int type, int root, Communicator *communicator, void *stream) {
    return ncclBroadcast(at, at, count, type, root, communicator, stream);
}

int ncclReduce(const void *from, void *to, size_t count, int type, int reduction, int root, Communicator *communicator,
               void *stream) {
    uint64_t bytes = count * size_of_type(type);
    Request request = {REDUCE, type, reduction, root, count, bytes, bytes, bytes};
    return run(communicator, request, from, to);
}

int ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *communicator, void *stream) {
    uint64_t bytes = count * size_of_type(type), all = bytes * communicator->num_ranks;
    Request request = {ALL_GATHER, type, SUM, 0, count, bytes, all, all};
    return run(communicator, request, from, to);
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int reduction, Communicator *communicator,
                      void *stream) {
    uint64_t bytes = count * size_of_type(type), all = bytes * communicator->num_ranks;
    Request request = {REDUCE_SCATTER, type, reduction, 0, count, all, bytes, all};
    return run(communicator, request, from, to);
}

int ncclAlltoAll(const void *from, void *to, size_t count, int type, Communicator *communicator, void *stream) {
    uint64_t all = count * size_of_type(type) * communicator->num_ranks;
    Request request = {ALL_TO_ALL, type, SUM, 0, count, all, all, all};
    return run(communicator, request, from, to);
}

int ncclSend(const void *at, size_t count, int type, int peer, Communicator *communicator, void *stream) {
    Request request = {POINT_TO_POINT, type, SUM, peer, count, 0, 0, count * size_of_type(type)};
    return run(communicator, request, NULL, NULL);
}

int ncclRecv(void *at, size_t count, int type, int peer, Communicator *communicator, void *stream) {
    return ncclSend(at, count, type, peer, communicator, stream);
}
