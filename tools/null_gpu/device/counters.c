/* Counters, and the functions by which region.py reads them. */
#include "counters.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { NUM_SLOTS = 1 << 16 };

struct kernel {
    const void *key;
    const char *name;
    long launched, captured;
};

/* Read by region.py, which lists the same names in the same order. */
struct totals {
    long launches, graph_launches, launches_in_graphs, graphs_recorded, waits, queries;
    long uploads, upload_bytes, pinned_uploads, downloads, download_bytes, copies, copy_bytes, fills, fill_bytes;
    long largest_pinned, largest_pinned_by_main; /* bytes of one request for pinned memory */
};

struct graph {
    long launches;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kernel kernels[NUM_SLOTS];
static struct totals totals;
static struct graph *capturing;
static long ever; /* launches, which no region sets back */
static void (*on_wait)(const char *call);

static struct kernel *slot_of(const void *key) {
    unsigned long slot = ((unsigned long)key * 0x9E3779B97F4A7C15ul) >> 48;
    while (kernels[slot].key && kernels[slot].key != key) slot = (slot + 1) % NUM_SLOTS;
    kernels[slot].key = key;
    return &kernels[slot];
}

void name_kernel(const void *key, const char *name) {
    pthread_mutex_lock(&lock);
    slot_of(key)->name = strdup(name);
    pthread_mutex_unlock(&lock);
}

static void count_locked(struct kernel *kernel) {
    ever++;
    if (capturing) {
        kernel->captured++;
        capturing->launches++;
    } else {
        kernel->launched++;
        totals.launches++;
    }
}

void count_launch(const void *key) {
    pthread_mutex_lock(&lock);
    count_locked(slot_of(key));
    pthread_mutex_unlock(&lock);
}

void count_launch_named(const char *name) { /* a literal, so its address is the key */
    pthread_mutex_lock(&lock);
    struct kernel *kernel = slot_of(name);
    kernel->name = name;
    count_locked(kernel);
    pthread_mutex_unlock(&lock);
}

void count_wait(const char *call) {
    pthread_mutex_lock(&lock);
    int counts = !capturing;
    totals.waits += counts;
    pthread_mutex_unlock(&lock);
    if (counts && on_wait) on_wait(call);
}

void count_copy(enum direction direction, size_t bytes, int is_pinned) { /* within a graph only a launch */
    pthread_mutex_lock(&lock);
    if (capturing) {
    } else if (direction == TO_DEVICE) {
        totals.uploads++;
        totals.upload_bytes += bytes;
        totals.pinned_uploads += is_pinned;
    } else if (direction == TO_HOST) {
        totals.downloads++;
        totals.download_bytes += bytes;
    } else {
        totals.copies++;
        totals.copy_bytes += bytes;
    }
    pthread_mutex_unlock(&lock);
    if (direction == ON_DEVICE) count_launch_named("copy on the device");
}

void count_pinned(size_t bytes) {
    int is_main = syscall(SYS_gettid) == getpid();
    pthread_mutex_lock(&lock);
    if ((long)bytes > totals.largest_pinned) totals.largest_pinned = bytes;
    if (is_main && (long)bytes > totals.largest_pinned_by_main) totals.largest_pinned_by_main = bytes;
    pthread_mutex_unlock(&lock);
}

void count_fill(size_t bytes) {
    pthread_mutex_lock(&lock);
    totals.fills += !capturing;
    totals.fill_bytes += capturing ? 0 : bytes;
    pthread_mutex_unlock(&lock);
    count_launch_named("fill of memory");
}

void count_query(void) {
    pthread_mutex_lock(&lock);
    totals.queries++;
    pthread_mutex_unlock(&lock);
}

void begin_graph(void) {
    pthread_mutex_lock(&lock);
    capturing = calloc(1, sizeof *capturing);
    pthread_mutex_unlock(&lock);
}

void *end_graph(void) {
    pthread_mutex_lock(&lock);
    struct graph *graph = capturing;
    capturing = NULL;
    totals.graphs_recorded++;
    pthread_mutex_unlock(&lock);
    return graph;
}

void launch_graph(void *graph) {
    pthread_mutex_lock(&lock);
    totals.graph_launches++;
    totals.launches_in_graphs += ((struct graph *)graph)->launches;
    pthread_mutex_unlock(&lock);
}

long launches_ever(void) { return ever; }

int is_capturing(void) { return capturing != NULL; }

void *new_handle(void) {
    static long last = 1 << 12;
    return (void *)__sync_add_and_fetch(&last, 16);
}

/* For region.py. */
EXPORT void null_gpu_reset(void) {
    pthread_mutex_lock(&lock);
    memset(&totals, 0, sizeof totals);
    for (int slot = 0; slot < NUM_SLOTS; slot++) kernels[slot].launched = kernels[slot].captured = 0;
    pthread_mutex_unlock(&lock);
}

EXPORT void null_gpu_totals(struct totals *found) { *found = totals; }

EXPORT void null_gpu_on_wait(void (*hook)(const char *call)) { on_wait = hook; }

EXPORT void null_gpu_kernels(void (*each)(const char *name, long launched, long captured)) {
    for (int slot = 0; slot < NUM_SLOTS; slot++) {
        struct kernel *kernel = &kernels[slot];
        if (kernel->launched || kernel->captured)
            each(kernel->name ? kernel->name : "unnamed", kernel->launched, kernel->captured);
    }
}
