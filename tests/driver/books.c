/* Who holds how much of each card: the books over all processes, in a file that they share. Also what follows from
 * them: contexts, which cards a process sees, contexts that broke for good, and cards that are off the bus. */
#define _GNU_SOURCE
#include "played.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

Books *books;
Process *own;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
__thread int current_device;
int visible[MAX_DEVICES], num_visible = -1;

static __thread int last;
static int is_initialized, is_fork; /* cuInit was called; in a parent of this process */
static int broken_with;             /* the error that a kernel left, from broken_at_ns on */
static _Atomic int64_t broken_at_ns;

/* ---- processes */

/* When a process began, in the kernel's ticks, and its state's letter; X for one that is not there. */
static uint64_t start_of(int pid, char *state) {
    char path[64], text[1024];
    *state = 'X';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0)
        return 0;
    text[size] = 0;
    char *field = strrchr(text, ')');
    if (!field)
        return 0;
    field += 2;
    *state = *field;
    for (int number = 3; number < 22 && field; number++) {
        field = strchr(field, ' ');
        field = field ? field + 1 : NULL;
    }
    return field ? strtoull(field, NULL, 10) : 0;
}

int is_dead(int pid) {
    char state;
    return !start_of(pid, &state) || state == 'Z' || state == 'X';
}

static int lingers(Process *process) {
    int64_t now = now_ns(), unseen = 0;
    atomic_compare_exchange_strong(&process->died_ns, &unseen, now);
    return now - process->died_ns < books->linger_ns;
}

int is_alive(Process *process) {
    int pid = process->pid;
    char state;
    if (pid <= 0)
        return 0;
    if (process == own)
        return 1;
    uint64_t started = start_of(pid, &state);
    return started == process->started && state != 'Z' && state != 'X';
}

/* Whether its memory is still held; an entry that nobody holds is freed. */
static int is_booked(Process *process) {
    int pid = process->pid;
    if (pid <= 0)
        return 0;
    if (is_alive(process) || lingers(process))
        return 1;
    atomic_compare_exchange_strong(&process->pid, &pid, 0);
    return 0;
}

uint64_t used_bytes(int device) {
    uint64_t used = books->cards[device].neighbour_bytes;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        Process *process = &books->processes[i];
        if (process->pid && is_booked(process))
            used += process->held_bytes[device] + process->context_bytes[device];
    }
    uint64_t total = settings.cards[device].total_bytes;
    return used < total ? used : total;
}

int book(int device, uint64_t size) {
    if (used_bytes(device) + size > settings.cards[device].total_bytes)
        return failed(cudaErrorMemoryAllocation);
    own->held_bytes[device] += size;
    return cudaSuccess;
}

/* ---- the file */

static void in_child(void) {
    if (is_initialized)
        is_fork = 1;
    own = NULL;
    pthread_mutex_init(&lock, NULL);
}

static void complain(const char *what) {
    fprintf(stderr, "the played driver cannot use its books %s: %s\n", settings.state, what);
    abort();
}

/* What the first process to come writes. */
static void open_card(int device) {
    CardState *card = &books->cards[device];
    int64_t unread = 0;
    uint32_t unknown = 0;
    atomic_compare_exchange_strong(&card->energy_read_ns, &unread, now_ns());
    if (atomic_compare_exchange_strong(&card->is_neighbour_known, &unknown, 1))
        card->neighbour_bytes = settings.cards[device].neighbour_bytes;
}

static void open_books(void) {
    int file = -1, flags = MAP_SHARED | MAP_ANONYMOUS;
    if (*settings.state) {
        file = open(settings.state, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (file < 0 || ftruncate(file, sizeof(Books)))
            complain("the file named by PLAYED_STATE cannot be written");
        flags = MAP_SHARED;
    }
    books = mmap(NULL, sizeof(Books), PROT_READ | PROT_WRITE, flags, file, 0);
    if (books == MAP_FAILED)
        complain("it cannot be mapped");
    if (file >= 0)
        close(file);
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&books->version, &none, BOOKS_VERSION) && none != BOOKS_VERSION)
        complain("another version of the driver wrote it; take a new file");
    books->size = sizeof(Books);
    for (int i = 0; i < MAX_DEVICES; i++)
        open_card(i);
}

__attribute__((constructor)) static void load(void) {
    read_settings();
    open_books();
    pthread_atfork(NULL, NULL, in_child);
}

/* ---- names of the cards, and which of them are visible */

void make_uuid(int device, unsigned char *bytes) {
    static const unsigned char base[16] = {0x91, 0xa7, 0xed, 0xca, 0x4d, 0, 0x40, 0, 0x80};
    memcpy(bytes, base, sizeof base);
    bytes[14] = settings.mig ? 1 : 0;
    bytes[15] = device;
}

void write_uuid(int device, char *text, size_t size) {
    unsigned char u[16];
    make_uuid(device, u);
    snprintf(text, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2],
             u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
    if (settings.mig)
        memcpy(text, "MIG", 3);
}

void write_board_uuid(int device, char *text, size_t size) {
    write_uuid(device, text, size);
    if (!settings.mig)
        return;
    memcpy(text, "GPU", 3);
    text[37] = '0'; /* the digit that a slice's has more */
}

void write_bus_id(int device, char *text, size_t size) {
    snprintf(text, size, "0000:%02X:00.0", device + 1);
}

/* CUDA counts the fastest card first, unless CUDA_DEVICE_ORDER says PCI_BUS_ID. */
static void put_in_order(int *order) {
    const char *asked = getenv("CUDA_DEVICE_ORDER");
    for (int i = 0; i < settings.num_devices; i++)
        order[i] = i;
    if (asked && !strcmp(asked, "PCI_BUS_ID"))
        return;
    for (int i = 1; i < settings.num_devices; i++)
        for (int j = i; j > 0; j--)
            if (settings.cards[order[j]].fp32_flops > settings.cards[order[j - 1]].fp32_flops) {
                int slower = order[j - 1];
                order[j - 1] = order[j];
                order[j] = slower;
            }
}

/* The card that an entry of CUDA_VISIBLE_DEVICES names, or -1. */
static int card_named(const char *text, const int *order) {
    char uuid[64];
    if (*text >= '0' && *text <= '9')
        return atoi(text) < settings.num_devices ? order[atoi(text)] : -1;
    if (strncmp(text, "MIG-", 4) && strncmp(text, "GPU-", 4))
        return -1;
    for (int i = 0; i < settings.num_devices; i++) {
        write_uuid(i, uuid, sizeof uuid);
        if (!strncmp(uuid, text, strlen(text)))
            return i;
        write_board_uuid(i, uuid, sizeof uuid); /* which stands for its first slice */
        if (!strncmp(uuid, text, strlen(text)))
            return i;
    }
    return -1;
}

/* As in CUDA, the list ends before the first entry that names no card, and is empty if one is named twice. */
static void find_visible(void) {
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    char text[512], *rest;
    int order[MAX_DEVICES];
    put_in_order(order);
    num_visible = 0;
    if (!wanted) {
        memcpy(visible, order, sizeof order);
        num_visible = settings.num_devices;
        return;
    }
    snprintf(text, sizeof text, "%s", wanted);
    for (char *part = strtok_r(text, ",", &rest); part; part = strtok_r(NULL, ",", &rest)) {
        int found = card_named(part + strspn(part, " "), order);
        if (found < 0)
            return;
        for (int i = 0; i < num_visible; i++)
            if (visible[i] == found) {
                num_visible = 0;
                return;
            }
        visible[num_visible++] = found;
    }
}

int device_now(void) {
    return visible[current_device];
}

/* ---- errors, contexts */

int failed(int error) {
    if (error) {
        last = error;
        note("failed with %d", error);
    }
    return error;
}

void forget_error(void) {
    last = cudaSuccess;
}

int last_error(void) {
    return last;
}

void break_context(int error, int64_t at_ns) {
    if (broken_at_ns)
        return;
    note("context breaks with %d", error);
    broken_with = error;
    broken_at_ns = at_ns;
}

int initialize(void) {
    if (is_fork)
        return failed(cudaErrorInitializationError);
    if (settings.driver_version < RUNTIME_VERSION)
        return failed(cudaErrorInsufficientDriver);
    pthread_mutex_lock(&lock);
    if (num_visible < 0)
        find_visible();
    pthread_mutex_unlock(&lock);
    is_initialized = 1;
    return num_visible ? cudaSuccess : failed(cudaErrorNoDevice);
}

static int take_entry(void) {
    char state;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        Process *process = &books->processes[i];
        int nobody = 0;
        is_booked(process);
        if (!atomic_compare_exchange_strong(&process->pid, &nobody, -1))
            continue;
        process->started = start_of(getpid(), &state);
        process->launches = 0;
        process->died_ns = 0;
        process->busy_ns = 0;
        for (int d = 0; d < MAX_DEVICES; d++)
            process->held_bytes[d] = process->context_bytes[d] = 0;
        process->pid = getpid();
        own = process;
        return cudaSuccess;
    }
    return failed(cudaErrorUnknown);
}

static int make_context(int device) {
    int error = own ? cudaSuccess : take_entry();
    if (error || own->context_bytes[device])
        return error;
    Card *card = &settings.cards[device];
    if (used_bytes(device) + card->context_bytes > card->total_bytes)
        return failed(cudaErrorMemoryAllocation);
    own->context_bytes[device] = card->context_bytes;
    note("context on %d", device);
    return cudaSuccess;
}

static int has_context(int device) {
    return own && own->context_bytes[device];
}

int enter(void) {
    INITIALIZE();
    int device = device_now(), lost_with = books->cards[device].error;
    if (lost_with && !has_context(device))
        return failed(cudaErrorDevicesUnavailable);
    if (lost_with)
        break_context(lost_with, now_ns());
    if (broken_at_ns && now_ns() >= broken_at_ns)
        return failed(broken_with);
    if (has_context(device))
        return cudaSuccess;
    pthread_mutex_lock(&lock);
    int error = make_context(device);
    pthread_mutex_unlock(&lock);
    return error;
}

int load_library(void) {
    if (enter())
        return 1;
    int device = device_now();
    Card *card = &settings.cards[device];
    pthread_mutex_lock(&lock);
    int is_full = used_bytes(device) + card->library_bytes > card->total_bytes;
    if (!is_full)
        own->context_bytes[device] += card->library_bytes;
    pthread_mutex_unlock(&lock);
    return is_full;
}

/* ---- power */

unsigned power_mw(int device) {
    unsigned played = books->cards[device].power_mw;
    return played ? played : settings.cards[device].idle_w * 1e3;
}

void draw(int device, double nj) {
    if (!books->cards[device].power_mw) /* else a test says what it draws, whatever it does */
        books->cards[device].work_nj += (uint64_t)nj;
}

uint64_t energy_mj(int device) {
    CardState *card = &books->cards[device];
    uint64_t idle_mj = (now_ns() - card->energy_read_ns) / 1e9 * power_mw(device);
    return card->energy_mj + idle_mj + card->work_nj / 1000000;
}
