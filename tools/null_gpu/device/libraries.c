/* cuBLAS, cuBLASLt, cuDNN and NCCL: handles that mean nothing, products that are one launch each. */
#include "counters.h"

#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, DESCRIPTOR_BYTES = 1024, HEURISTIC_BYTES = 96 };

static int new_descriptor(void **found) { return *found = calloc(1, DESCRIPTOR_BYTES), SUCCESS; }
static int free_descriptor(void *descriptor) { return free(descriptor), SUCCESS; }
static int one_launch(const char *name) { return count_launch_named(name), SUCCESS; }

EXPORT int cublasCreate_v2(void **handle) { return *handle = new_handle(), SUCCESS; }
EXPORT int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, SUCCESS; }
EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, SUCCESS; }
EXPORT int cublasGemmEx() { return one_launch("cublasGemmEx"); }
EXPORT int cublasGemmStridedBatchedEx() { return one_launch("cublasGemmStridedBatchedEx"); }
EXPORT int cublasSgemm_v2() { return one_launch("cublasSgemm"); }
EXPORT int cublasSgemmStridedBatched() { return one_launch("cublasSgemmStridedBatched"); }
EXPORT int cublasSgemv_v2() { return one_launch("cublasSgemv"); }
EXPORT int cublasSdot_v2() { return one_launch("cublasSdot"); }
EXPORT int cublasDotEx() { return one_launch("cublasDotEx"); }

EXPORT size_t cublasLtGetVersion() { return 130100; }
EXPORT int cublasLtCreate(void **handle) { return *handle = new_handle(), SUCCESS; }
EXPORT int cublasLtMatmulDescCreate(void **found, int compute, int scale) { return new_descriptor(found); }
EXPORT int cublasLtMatmulDescDestroy(void *descriptor) { return free_descriptor(descriptor); }
EXPORT int cublasLtMatrixLayoutCreate(void **found, int type, unsigned long rows, unsigned long columns, long stride) {
    return new_descriptor(found);
}
EXPORT int cublasLtMatrixLayoutDestroy(void *descriptor) { return free_descriptor(descriptor); }
EXPORT int cublasLtMatmulPreferenceCreate(void **found) { return new_descriptor(found); }
EXPORT int cublasLtMatmulPreferenceDestroy(void *descriptor) { return free_descriptor(descriptor); }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d,
                                          void *preference, int num_wanted, void *found, int *num_found) {
    memset(found, 0, HEURISTIC_BYTES);
    return *num_found = 1, SUCCESS;
}
EXPORT int cublasLtMatmul() { return one_launch("cublasLtMatmul"); }

/* Older than any that torch takes attention from, so that flash attention is taken. */
EXPORT size_t cudnnGetVersion(void) { return 8000; }
EXPORT int cudnnCreate(void **handle) { return *handle = new_handle(), SUCCESS; }
EXPORT const char *cudnnGetErrorString(int status) { return "an error of the null GPU"; }

EXPORT int ncclGetVersion(int *version) { return *version = 22809, SUCCESS; }
EXPORT int ncclCommInitRank(void **found) { return *found = new_handle(), SUCCESS; }
EXPORT int ncclCommInitRankConfig(void **found) { return *found = new_handle(), SUCCESS; }
EXPORT int ncclCommInitRankScalable(void **found) { return *found = new_handle(), SUCCESS; }
EXPORT int ncclCommSplit(void *of, int color, int key, void **found) { return *found = new_handle(), SUCCESS; }
EXPORT int ncclCommGetAsyncError(void *communicator, int *error) { return *error = 0, SUCCESS; }
EXPORT int ncclCommCuDevice(void *communicator, int *device) { return *device = 0, SUCCESS; }
EXPORT int ncclCommCount(void *communicator, int *count) { return *count = 1, SUCCESS; }
EXPORT int ncclCommUserRank(void *communicator, int *rank) { return *rank = 0, SUCCESS; }
EXPORT const char *ncclGetErrorString(int error) { return "an error of the null GPU"; }
EXPORT const char *ncclGetLastError(void *communicator) { return "an error of the null GPU"; }
EXPORT int ncclAllReduce() { return one_launch("ncclAllReduce"); }
EXPORT int ncclAllGather() { return one_launch("ncclAllGather"); }
EXPORT int ncclReduceScatter() { return one_launch("ncclReduceScatter"); }
EXPORT int ncclBroadcast() { return one_launch("ncclBroadcast"); }
EXPORT int ncclReduce() { return one_launch("ncclReduce"); }
