/* The CUDA runtime without a device: memory is the host's, kernels do nothing, and each call is counted. */
#include "counters.h"
#include "h100.h"

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

/* Kernels, which the compiler registers by the address of their stub on the host. */
static void *fat_binary[2];
EXPORT void **__cudaRegisterFatBinary(void *binary) { return fat_binary; }
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT void __cudaRegisterVar(void **h, char *host, char *on_device, const char *name, int e, size_t n, int c, int g) {}
EXPORT char __cudaInitModule(void **handle) { return 0; }
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *on_device, const char *name, int threads,
                                   void *a, void *b, void *c, void *d, int *warp) {
    name_kernel(host, name);
}

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(void **kernel, const void *host) {
    *kernel = (void *)host;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(void *k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t stream) {
    count_launch(k);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void *k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t stream) {
    count_launch(k);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *k, void **a) {
    count_launch(k);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t stream) {
    count_launch(k);
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 64;
    found->binaryVersion = found->ptxVersion = 90;
    found->maxDynamicSharedSizeBytes = 232448;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *k, int block, size_t shared) {
    *n = 2;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *k, int block, size_t s,
                                                                         unsigned flags) {
    *n = 2;
    return cudaSuccess;
}

/* The device. */
EXPORT cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDA_VERSION_SAID, cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDA_VERSION_SAID, cudaSuccess; }

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, DEVICE_NAME);
    found->totalGlobalMem = TOTAL_BYTES;
    found->sharedMemPerBlock = attribute_of(8);
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->major = 9;
    found->minor = 0;
    found->multiProcessorCount = 132;
    found->maxThreadsPerMultiProcessor = 2048;
    found->sharedMemPerMultiprocessor = 233472;
    found->sharedMemPerBlockOptin = 232448;
    found->reservedSharedMemPerBlock = 1024;
    found->l2CacheSize = 52428800;
    found->memoryBusWidth = 5120;
    found->maxBlocksPerMultiProcessor = 32;
    found->textureAlignment = 512;
    found->asyncEngineCount = 3;
    found->unifiedAddressing = found->canMapHostMemory = found->concurrentKernels = found->cooperativeLaunch = 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr number, int device) {
    *value = attribute_of(number);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

EXPORT const char *cudaGetErrorName(cudaError_t error) { return "cudaError"; }
EXPORT const char *cudaGetErrorString(cudaError_t error) { return error ? "an error of the null GPU" : "no error"; }

/* Memory: pages of the host, which are there when they are touched. Pinned memory is remembered. */
enum { NUM_PINNED = 4096 };
static struct {
    char *begin, *end;
} pinned[NUM_PINNED];

static int is_pinned(const void *address) {
    for (int i = 0; i < NUM_PINNED && pinned[i].begin; i++)
        if ((char *)address >= pinned[i].begin && (char *)address < pinned[i].end) return 1;
    return 0;
}

static void remember_pinned(void *begin, size_t bytes) {
    count_pinned(bytes);
    for (int i = 0; i < NUM_PINNED; i++)
        if (__sync_bool_compare_and_swap(&pinned[i].begin, NULL, begin)) {
            pinned[i].end = (char *)begin + bytes;
            return;
        }
}

static cudaError_t take(void **address, size_t bytes) {
    *address = mmap(NULL, bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *address == MAP_FAILED ? cudaErrorMemoryAllocation : cudaSuccess;
}

EXPORT cudaError_t cudaMalloc(void **address, size_t bytes) { return take(address, bytes); }
EXPORT cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t s) { return take(address, bytes); }
EXPORT cudaError_t cudaFree(void *address) { return cudaSuccess; }

EXPORT cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    cudaError_t error = take(address, bytes);
    if (!error) remember_pinned(*address, bytes);
    return error;
}

EXPORT cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    remember_pinned(address, bytes);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    *unused = FREE_BYTES;
    *total = TOTAL_BYTES;
    return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    memset(found, 0, sizeof *found);
    found->type = is_pinned(address) ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    found->devicePointer = (void *)address;
    return cudaSuccess;
}

/* A number that a kernel computed reads as 0: otherwise it would be what an earlier tensor left at its address, and
   counts such as those of nonzero() would be any number. One that was uploaded a moment ago is read as it is. */
enum { NUMBER_BYTES = 8, NUM_UPLOADS = 1 << 10, MOMENT = 4 /* launches */ };
static struct {
    const void *address;
    long at;
} uploads[NUM_UPLOADS];

static unsigned slot_of(const void *address) { return ((unsigned long)address >> 9) % NUM_UPLOADS; }

static int is_computed(const void *address, size_t bytes) {
    unsigned slot = slot_of(address);
    int is_fresh = uploads[slot].address == address && launches_ever() - uploads[slot].at <= MOMENT;
    return bytes <= NUMBER_BYTES && !is_fresh;
}

static void copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    if (kind == cudaMemcpyDeviceToDevice) {
        count_copy(ON_DEVICE, bytes, 0);
        return; /* the bytes mean nothing */
    }
    if (kind == cudaMemcpyDeviceToHost && is_computed(from, bytes))
        memset(to, 0, bytes);
    else
        memcpy(to, from, bytes);
    if (kind == cudaMemcpyHostToDevice) {
        uploads[slot_of(to)].address = to;
        uploads[slot_of(to)].at = launches_ever();
    }
    if (kind == cudaMemcpyHostToDevice) count_copy(TO_DEVICE, bytes, is_pinned(from));
    if (kind == cudaMemcpyDeviceToHost) count_copy(TO_HOST, bytes, is_pinned(to));
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    copy(to, from, bytes, kind);
    if (kind != cudaMemcpyDeviceToDevice) count_wait("cudaMemcpy");
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
    copy(to, from, bytes, kind);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t s) {
    for (size_t row = 0; kind != cudaMemcpyDeviceToDevice && row < height; row++)
        memcpy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    enum direction direction = kind == cudaMemcpyHostToDevice   ? TO_DEVICE
                               : kind == cudaMemcpyDeviceToHost ? TO_HOST
                                                                : ON_DEVICE;
    count_copy(direction, width * height, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void *address, int value, size_t bytes) { return count_fill(bytes), cudaSuccess; }
EXPORT cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t s) {
    return count_fill(bytes), cudaSuccess;
}

/* Streams and events. */
EXPORT cudaError_t cudaDeviceSynchronize(void) { return count_wait("cudaDeviceSynchronize"), cudaSuccess; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s) { return count_wait("cudaStreamSynchronize"), cudaSuccess; }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e) { return count_wait("cudaEventSynchronize"), cudaSuccess; }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) { return count_query(), cudaSuccess; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return count_query(), cudaSuccess; }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *s) { return *s = new_handle(), cudaSuccess; }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
    return *s = new_handle(), cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { return *priority = 0, cudaSuccess; }
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *e) { return *e = new_handle(), cudaSuccess; }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { return *e = new_handle(), cudaSuccess; }
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { return *ms = 1, cudaSuccess; }

/* Graphs. */
static enum cudaStreamCaptureStatus capture_status(void) {
    return is_capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = capture_status();
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **after,
                                            const cudaGraphEdgeData **edges, size_t *num_after) {
    *status = capture_status();
    if (id) *id = 1;
    if (graph) *graph = (void *)16;
    if (after) *after = NULL;
    if (num_after) *num_after = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    return begin_graph(), cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) { return *graph = end_graph(), cudaSuccess; }
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long f) {
    return *made = (cudaGraphExec_t)graph, cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long f) {
    return *made = (cudaGraphExec_t)graph, cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    return *count = 1, cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s) { return launch_graph(graph), cudaSuccess; }
