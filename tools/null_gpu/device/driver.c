/* The CUDA driver, as Triton and torch use it: modules of compiled kernels, and their launches. */
#include "counters.h"
#include "h100.h"

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define CONTEXT ((void *)64)
enum { SUCCESS = 0 };
enum { MAX_THREADS_PER_BLOCK = 0, LOCAL_SIZE_BYTES = 3, NUM_REGS = 4 }; /* of CUfunction_attribute */
enum { MEMORY_TYPE = 2, DEVICE_POINTER = 3, ON_A_DEVICE = 2 };          /* of CUpointer_attribute */

EXPORT int cuInit(unsigned flags) { return SUCCESS; }
EXPORT int cuDriverGetVersion(int *version) { return *version = CUDA_VERSION_SAID, SUCCESS; }
EXPORT int cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
EXPORT int cuDeviceGet(int *device, int number) { return *device = 0, SUCCESS; }
EXPORT int cuDeviceGetName(char *name, int size, int device) { return strncpy(name, DEVICE_NAME, size), SUCCESS; }
EXPORT int cuDeviceGetAttribute(int *value, int number, int device) { return *value = attribute_of(number), SUCCESS; }

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = CONTEXT, SUCCESS; }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    return *flags = 0, *is_active = 1, SUCCESS;
}
EXPORT int cuCtxGetCurrent(void **context) { return *context = CONTEXT, SUCCESS; }
EXPORT int cuCtxGetDevice(int *device) { return *device = 0, SUCCESS; }
EXPORT int cuCtxSetCurrent(void *context) { return SUCCESS; }
EXPORT int cuCtxPushCurrent_v2(void *context) { return SUCCESS; }
EXPORT int cuCtxPopCurrent_v2(void **context) { return context ? *context = CONTEXT : 0, SUCCESS; }
EXPORT int cuStreamGetCtx(void *stream, void **context) { return *context = CONTEXT, SUCCESS; }

EXPORT int cuModuleLoad(void **module, const char *path) { return *module = new_handle(), SUCCESS; }
EXPORT int cuModuleLoadData(void **module, const void *image) { return *module = new_handle(), SUCCESS; }
EXPORT int cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *options, void *values) {
    return *module = new_handle(), SUCCESS;
}
EXPORT int cuModuleUnload(void *module) { return SUCCESS; }
EXPORT int cuModuleGetFunction(void **kernel, void *module, const char *name) {
    *kernel = new_handle();
    name_kernel(*kernel, name);
    return SUCCESS;
}
EXPORT int cuFuncGetAttribute(int *value, int number, void *kernel) {
    *value = number == MAX_THREADS_PER_BLOCK ? 1024 : number == NUM_REGS ? 64 : 0;
    return SUCCESS;
}
EXPORT int cuFuncSetAttribute(void *kernel, int number, int value) { return SUCCESS; }
EXPORT int cuFuncSetCacheConfig(void *kernel, int config) { return SUCCESS; }
EXPORT int cuOccupancyMaxActiveClusters(int *n, void *kernel, void *config) { return *n = 66, SUCCESS; }
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *kernel, int block, size_t shared) {
    return *n = 2, SUCCESS;
}

EXPORT int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **arguments, void **extra) {
    return count_launch(kernel), SUCCESS;
}
EXPORT int cuLaunchKernelEx(void *config, void *kernel, void **arguments, void **extra) {
    return count_launch(kernel), SUCCESS;
}

EXPORT int cuPointerGetAttribute(void *found, int number, unsigned long address) {
    if (number == MEMORY_TYPE)
        *(unsigned *)found = ON_A_DEVICE;
    else
        *(unsigned long *)found = number == DEVICE_POINTER ? address : 0;
    return SUCCESS;
}
EXPORT int cuMemGetAddressRange_v2(unsigned long *begin, size_t *size, unsigned long address) {
    return *begin = address, *size = 1 << 30, SUCCESS;
}
EXPORT int cuStreamGetCaptureInfo_v2(void *stream, int *status, void *id, void *graph, void *after, void *num_after) {
    return *status = is_capturing(), SUCCESS;
}
EXPORT int cuGetErrorString(int error, const char **text) { return *text = "an error of the null GPU", SUCCESS; }
EXPORT int cuGetErrorName(int error, const char **text) { return *text = "CUDA_ERROR", SUCCESS; }

/* Functions by name: ours, also where the name has a version that it was not asked with, or one that does nothing. */
static int does_nothing() { return SUCCESS; }

static void *function_of(const char *name) {
    char versioned[256];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void *found = dlsym(RTLD_DEFAULT, name);
    found = found ? found : dlsym(RTLD_DEFAULT, versioned);
    return found ? found : (void *)does_nothing;
}

EXPORT int cuGetProcAddress(const char *name, void **found, int version, unsigned long flags) {
    return *found = function_of(name), SUCCESS;
}
EXPORT int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long flags, int *status) {
    if (status) *status = SUCCESS;
    return *found = function_of(name), SUCCESS;
}
EXPORT int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                            int *status) {
    return cuGetProcAddress_v2(name, found, version, flags, status);
}
