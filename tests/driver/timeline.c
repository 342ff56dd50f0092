/* When things are done: one timeline a device, behind which streams, events, graphs and collectives wait.
 *
 * Kernels take a made-up time on it. A collective is done when all ranks have begun it; what is asked for later waits
 * behind it. */
#include "played.h"

#include <stdlib.h>
#include <time.h>

#define MAX_WAITING 4096

typedef struct {
    Communicator *communicator;
    uint64_t number;
    int64_t ns, behind_ns; /* of itself; of what was asked for behind it */
    char *to;
    uint64_t size;
} Collective;

typedef struct {
    pthread_mutex_t lock;
    Collective waiting[MAX_WAITING];
    int64_t finished_ns[MAX_WAITING];
    _Atomic uint64_t issued, settled;
    _Atomic int64_t ready_ns; /* when the device has done all that was asked of it */
} Line;

typedef struct {
    int64_t at_ns;
    int is_recorded, is_timed, device;
    uint64_t after; /* so many collectives; 0: at a known time */
} Event;

typedef struct {
    int64_t ns;
    double nj;
} Graph;

typedef void (*HostFunction)(void *);
typedef void (*StreamCallback)(void *, int, void *);

static Line lines[MAX_DEVICES] = {[0 ... MAX_DEVICES - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};
static struct {
    void *stream;
    uint64_t id;
    int64_t ns;
    double nj;
    Graph *graph;
    int is_on;
} capture;

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

void sleep_us(int us) {
    struct timespec span = {0, us * 1000};
    nanosleep(&span, NULL);
}

static int64_t later(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Sleeping is good to 50 microseconds or so; the rest is spent here. */
static void wait_until(int64_t at_ns) {
    for (int64_t left; (left = at_ns - now_ns()) > 0;)
        if (left > 60000) {
            struct timespec span = {left / 1000000000, (left - 50000) % 1000000000};
            nanosleep(&span, NULL);
        }
}

/* ---- the line of a device */

static int is_open(Line *line) {
    return line->issued != line->settled;
}

void settle(int device) {
    Line *line = &lines[device];
    if (!is_open(line))
        return;
    pthread_mutex_lock(&line->lock);
    while (is_open(line)) {
        Collective *first = &line->waiting[line->settled % MAX_WAITING];
        int64_t began = began_everywhere_ns(first->communicator, first->number, first->to);
        if (!began)
            break;
        int64_t done = later(line->ready_ns, began) + first->ns;
        line->finished_ns[line->settled % MAX_WAITING] = done;
        line->ready_ns = done + first->behind_ns;
        line->settled++;
    }
    pthread_mutex_unlock(&line->lock);
}

void enqueue_collective(Communicator *communicator, uint64_t number, int64_t ns, char *to, uint64_t size) {
    int device = device_now();
    Line *line = &lines[device];
    while (line->issued - line->settled >= MAX_WAITING - 1) {
        settle(device);
        sleep_us(100);
    }
    pthread_mutex_lock(&line->lock);
    line->waiting[line->issued % MAX_WAITING] = (Collective){communicator, number, ns, 0, to, size};
    line->issued++;
    pthread_mutex_unlock(&line->lock);
    settle(device);
}

void wait_for_device(int device) {
    for (settle(device); is_open(&lines[device]); settle(device))
        sleep_us(50);
    wait_until(lines[device].ready_ns);
}

static int is_busy(int device) {
    settle(device);
    return is_open(&lines[device]) || lines[device].ready_ns > now_ns();
}

static int will_be_written(Line *line, const char *from, uint64_t size) {
    int hit = 0;
    pthread_mutex_lock(&line->lock);
    for (uint64_t i = line->settled; i < line->issued; i++) {
        Collective *collective = &line->waiting[i % MAX_WAITING];
        if (collective->size && from < collective->to + collective->size && collective->to < from + size)
            hit = 1;
    }
    pthread_mutex_unlock(&line->lock);
    return hit;
}

/* Waits while a collective is to write there. */
void wait_for_data(const char *from, uint64_t size) {
    int device = device_now();
    for (settle(device); will_be_written(&lines[device], from, size); settle(device))
        sleep_us(50);
}

void work(double ns) {
    work_at(ns, settings.cards[device_now()].kernel_w);
}

void work_at(double ns, double watts) {
    double nj = ns * (watts - settings.cards[device_now()].idle_w);
    if (capture.is_on) {
        capture.ns += (int64_t)ns;
        capture.nj += nj;
        return;
    }
    draw(device_now(), nj);
    Line *line = &lines[device_now()];
    pthread_mutex_lock(&line->lock);
    if (is_open(line))
        line->waiting[(line->issued - 1) % MAX_WAITING].behind_ns += (int64_t)ns;
    else
        line->ready_ns = later(line->ready_ns, now_ns()) + (int64_t)ns;
    pthread_mutex_unlock(&line->lock);
    if (own)
        own->busy_ns += (uint64_t)ns;
}

int is_capturing(void) {
    return capture.is_on;
}

/* ---- streams */

int cudaDeviceSynchronize(void) {
    ENTER();
    if (capture.is_on)
        return failed(cudaErrorStreamCaptureUnsupported);
    wait_for_device(device_now());
    return enter(); /* a kernel that failed says so here */
}

int cudaStreamSynchronize(void *stream) {
    ENTER();
    if (capture.is_on && stream == capture.stream)
        return failed(cudaErrorStreamCaptureUnsupported);
    wait_for_device(device_now());
    return enter();
}

int cudaStreamQuery(void *stream) {
    ENTER();
    return is_busy(device_now()) ? cudaErrorNotReady : cudaSuccess;
}

int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    ENTER();
    int *made = calloc(4, sizeof *made);
    *made = priority;
    *stream = made;
    return cudaSuccess;
}

int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

int cudaStreamCreate(void **stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

int cudaStreamDestroy(void *stream) {
    free(stream);
    return cudaSuccess;
}

int cudaStreamGetPriority(void *stream, int *priority) {
    *priority = (uintptr_t)stream > 16 ? *(int *)stream : 0; /* small ones are CUDA's own streams */
    return cudaSuccess;
}

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    INITIALIZE();
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return cudaSuccess;
}

int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    ENTER();
    return cudaSuccess; /* there is one line for all streams */
}

int cudaLaunchHostFunc(void *stream, HostFunction function, void *data) {
    ENTER();
    function(data);
    return cudaSuccess;
}

int cudaStreamAddCallback(void *stream, StreamCallback callback, void *data, unsigned flags) {
    ENTER();
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

/* ---- events */

int cudaEventCreateWithFlags(void **event, unsigned flags) {
    ENTER();
    Event *made = calloc(1, sizeof *made);
    made->is_timed = !(flags & 2);
    *event = made;
    return cudaSuccess;
}

int cudaEventCreate(void **event) {
    return cudaEventCreateWithFlags(event, 0);
}

int cudaEventDestroy(void *event) {
    free(event);
    return cudaSuccess;
}

int cudaEventRecordWithFlags(Event *event, void *stream, unsigned flags) {
    ENTER();
    int device = device_now();
    Line *line = &lines[device];
    settle(device);
    pthread_mutex_lock(&line->lock);
    event->device = device;
    event->after = is_open(line) ? line->issued : 0;
    if (event->after)
        event->at_ns = line->waiting[(event->after - 1) % MAX_WAITING].behind_ns;
    else
        event->at_ns = later(line->ready_ns, now_ns());
    event->is_recorded = 1;
    pthread_mutex_unlock(&line->lock);
    return cudaSuccess;
}

int cudaEventRecord(Event *event, void *stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

/* Whether it waits for a collective that is not done. */
static int is_undetermined(Event *event) {
    if (!event->after)
        return 0;
    Line *line = &lines[event->device];
    settle(event->device);
    pthread_mutex_lock(&line->lock);
    int waits = line->settled < event->after;
    if (!waits && event->after) {
        event->at_ns += line->finished_ns[(event->after - 1) % MAX_WAITING];
        event->after = 0;
    }
    pthread_mutex_unlock(&line->lock);
    return waits;
}

int cudaEventQuery(Event *event) {
    ENTER();
    if (!event->is_recorded)
        return cudaSuccess;
    return is_undetermined(event) || event->at_ns > now_ns() ? cudaErrorNotReady : cudaSuccess;
}

int cudaEventSynchronize(Event *event) {
    ENTER();
    if (!event->is_recorded)
        return cudaSuccess;
    while (is_undetermined(event))
        sleep_us(50);
    wait_until(event->at_ns);
    return enter();
}

int cudaEventElapsedTime(float *ms, Event *from, Event *to) {
    ENTER();
    if (!from->is_recorded || !to->is_recorded || !from->is_timed || !to->is_timed)
        return failed(cudaErrorInvalidResourceHandle);
    if (cudaEventQuery(from) || cudaEventQuery(to))
        return failed(cudaErrorNotReady);
    *ms = (to->at_ns - from->at_ns) / 1e6;
    return cudaSuccess;
}

/* ---- graphs: the time of what was captured */

int cudaStreamBeginCapture(void *stream, int mode) {
    ENTER();
    if (capture.is_on)
        return failed(cudaErrorIllegalState);
    capture.stream = stream;
    capture.id++;
    capture.ns = 0;
    capture.nj = 0;
    capture.graph = calloc(1, sizeof(Graph));
    capture.is_on = 1;
    return cudaSuccess;
}

int cudaStreamEndCapture(void *stream, Graph **graph) {
    if (!capture.is_on)
        return failed(cudaErrorIllegalState);
    capture.graph->ns = capture.ns;
    capture.graph->nj = capture.nj;
    *graph = capture.graph;
    capture.is_on = 0;
    return cudaSuccess;
}

int cudaStreamIsCapturing(void *stream, int *status) {
    *status = capture.is_on && stream == capture.stream;
    return cudaSuccess;
}

int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph, const void **nodes,
                             const void **edges, size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (id)
        *id = capture.id;
    if (graph)
        *graph = capture.graph;
    if (nodes)
        *nodes = NULL;
    if (edges)
        *edges = NULL;
    if (count)
        *count = 0;
    return cudaSuccess;
}

int cudaGraphInstantiateWithFlags(Graph **executable, Graph *graph, unsigned long long flags) {
    *executable = malloc(sizeof **executable);
    **executable = *graph;
    return cudaSuccess;
}

int cudaGraphLaunch(Graph *executable, void *stream) {
    ENTER();
    work_at(executable->ns + 5000, settings.cards[device_now()].idle_w);
    draw(device_now(), executable->nj);
    return cudaSuccess;
}

int cudaGraphDestroy(Graph *graph) {
    free(graph);
    return cudaSuccess;
}

int cudaGraphExecDestroy(Graph *executable) {
    free(executable);
    return cudaSuccess;
}

int cudaGraphGetNodes(Graph *graph, void **nodes, size_t *count) {
    *count = 1;
    if (nodes)
        *nodes = graph;
    return cudaSuccess;
}

int cudaGraphNodeGetDependencies(void *node, void **nodes, void **edges, size_t *count) {
    *count = 0;
    return cudaSuccess;
}
